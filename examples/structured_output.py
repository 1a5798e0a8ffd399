"""Asks for JSON that follows a schema (start a gateway with `make up`).

usage: .venv/bin/python examples/structured_output.py ["a person in a few words"] [HOST:PORT]
"""

import json
import sys

from headrace.client import Client, chat_prompt
from headrace.common.errors import RequestError
from headrace.common.v1.params_pb2 import SamplingParams, StructuredOutputs
from headrace.gateway_api.v1.generation_pb2 import GenerateRequest

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["music", "chess", "running"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}


def main(person: str = "a sailor who plays chess", server: str = "127.0.0.1:50051") -> None:
    """Prints the answer as Python sees it. Any sampling goes; this one gives the same person every time."""
    request = GenerateRequest(
        prompt=chat_prompt([("user", f"Describe {person} as JSON.")]),
        sampling=SamplingParams(
            temperature=0.8,
            seed=7,
            max_tokens=200,
            structured_outputs=StructuredOutputs(json_schema=json.dumps(PERSON), disable_any_whitespace=True),
        ),
    )
    with Client(server) as client:
        text = "".join(output.text for message in client.generate(request) for output in message.outputs)
    print(json.loads(text))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except RequestError as error:
        sys.exit(f"structured_output.py: {error.message}")
