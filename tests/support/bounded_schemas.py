"""JSON schemas whose values are short, of the kinds that users write, each with what a user would ask for."""

from typing import Any

NAME = {"type": "string", "minLength": 1, "maxLength": 20}
AGE = {"type": "integer", "minimum": 0, "maximum": 120}
COLOUR = {"enum": ["red", "green", "blue"]}


def closed(required: dict[str, Any], optional: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """An object of these properties and no others."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
        **more,
    }


def listed(items: dict[str, Any], most: int, least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


SCHEMAS: dict[str, dict[str, Any]] = {
    "Describe a person": closed({"name": NAME, "age": AGE}),
    "Describe a person and where they live": closed(
        {"name": NAME, "home": closed({"city": NAME, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}})}
    ),
    "Describe a company by its departments": closed(
        {
            "company": NAME,
            "departments": listed(closed({"title": NAME, "lead": closed({"name": NAME, "age": AGE})}), 2, 1),
        }
    ),
    "Name some colours": listed(COLOUR, 4, 1),
    "Rate a film": closed({"stars": {"type": "integer", "minimum": 1, "maximum": 5}, "good": {"type": "boolean"}}),
    "Give the temperature in Paris": closed(
        {"celsius": {"type": "number", "minimum": -30, "maximum": 45, "multipleOf": 0.1}, "sunny": {"type": "boolean"}}
    ),
    "Give a price": {"type": "number", "minimum": 0, "exclusiveMaximum": 100, "multipleOf": 0.01},
    "Give an even number of eggs": {"type": "integer", "minimum": 2, "maximum": 24, "multipleOf": 2},
    "Give a phone number": closed({"phone": {"type": "string", "pattern": r"^\+[0-9]{2} [0-9]{3} [0-9]{4}$"}}),
    "Give a licence plate": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}-[A-Z]{2}$"},
    "Give a date of birth": closed({"name": NAME, "born": {"type": "string", "format": "date"}}),
    "Give an identifier": closed({"id": {"type": "string", "format": "uuid"}}),
    "Name a pet or nothing": {"anyOf": [closed({"kind": {"const": "cat"}, "lives": AGE}), {"type": "null"}]},
    "Give a shape": {
        "oneOf": [
            closed({"shape": {"const": "circle"}, "radius": AGE}),
            closed({"shape": {"const": "square"}, "side": AGE}),
        ]
    },
    "Give a point and its label": {
        "type": "array",
        "prefixItems": [
            {"type": "integer", "minimum": -9, "maximum": 9},
            {"type": "integer", "minimum": -9, "maximum": 9},
            NAME,
        ],
        "items": False,
        "minItems": 3,
    },
    "Give a grid of numbers": listed(listed({"type": "integer", "minimum": 0, "maximum": 9}, 3, 3), 3, 3),
    "Describe a product": closed(
        {"sku": {"type": "string", "pattern": "^[A-Z]{3}[0-9]{4}$"}}, {"colour": COLOUR, "tags": listed(NAME, 2)}
    ),
    'Write a chain of two values such as {"value": 3, "next": {"value": 5, "next": null}}': {
        "$defs": {"node": closed({"value": AGE, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}})},
        "$ref": "#/$defs/node",
    },
    'Write one folder such as {"name": "home", "folders": []}': {
        "$defs": {"folder": closed({"name": NAME, "folders": listed({"$ref": "#/$defs/folder"}, 1)})},
        "$ref": "#/$defs/folder",
    },
    "Write a small sum": {
        "$defs": {
            "term": {
                "anyOf": [
                    {"type": "integer", "minimum": 0, "maximum": 99},
                    closed(
                        {
                            "plus": {
                                "type": "array",
                                "prefixItems": [
                                    {"type": "integer", "minimum": 0, "maximum": 9},
                                    {"$ref": "#/$defs/term"},
                                ],
                                "items": False,
                                "minItems": 2,
                            }
                        }
                    ),
                ]
            }
        },
        "$ref": "#/$defs/term",
    },
    "Describe an order": closed(
        {
            "order": {"type": "integer", "minimum": 1, "maximum": 99999},
            "lines": listed(closed({"item": NAME, "count": {"type": "integer", "minimum": 1, "maximum": 9}}), 3, 1),
            "express": {"type": "boolean"},
        },
        {"note": {"type": ["string", "null"], "maxLength": 30}},
    ),
    "Call the weather tool": closed(
        {"name": {"const": "get_weather"}, "arguments": closed({"city": NAME, "unit": {"enum": ["C", "F"]}})}
    ),
    "Say whether it is true": {"type": "boolean"},
    "Merge two descriptions": {
        "allOf": [
            {"type": "object", "properties": {"a": AGE, "b": COLOUR}, "required": ["a"], "additionalProperties": False},
            {"type": "object", "properties": {"a": {"type": "integer", "minimum": 10}}, "required": ["b"]},
        ]
    },
}
