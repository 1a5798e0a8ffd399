"""Renders chat templates in a process of its own: `python -m headrace.gateway.template_worker`.

A template is a program that comes with the model's files. Jinja's sandbox keeps it from the machine, but not from
looping for hours or building a string of a terabyte, inside calls that no other thread can interrupt. So it runs here,
within limits (`headrace.common.limited_worker`).

The first message is COMPILE, each one after it a JSON object with `template` and `variables`. An answer is one byte (OK
or one of the errors below) and UTF-8 text: the rendered prompt, or what went wrong.

Rules and names in the templates' world are those of Hugging Face transformers: blocks trimmed, `raise_exception`,
`strftime_now`, `tojson` that does not escape HTML, `{% break %}`, `{% generation %}`.
"""

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from headrace.common.limited_worker import Handler, serve

OK, SYNTAX_ERROR, REFUSED, FAILED, TOO_LONG = b"OSRFT"

COMPILE = b""
MAX_ERROR_CHARS = 1000


class _Refusal(TemplateError):
    """The template called raise_exception."""


class _TooLong(Exception):
    """The rendered prompt is over its limit."""


class _GenerationBlock(Extension):
    """`{% generation %}` marks what the model wrote, for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it like this

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("render_body"), [], [], body).set_lineno(line)

    def render_body(self, caller: Callable[[], str]) -> str:
        return caller()


class _SafeNamespace(Namespace):
    """Refuses names that start with an underscore: through them lie ways out of the sandbox."""

    def __init__(*args: Any, **attributes: Any) -> None:
        self, *given = args  # so that a template may set an attribute named "self"
        values = dict(*given, **attributes)
        for name in values:
            _check_attribute(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace attribute must not start with an underscore: {name!r}")


def _raise_exception(message: Any) -> None:
    raise _Refusal(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _make_dict(*pairs: Any, **items: Any) -> dict[Any, Any]:
    return dict(*pairs, **items)


def make_environment() -> ImmutableSandboxedEnvironment:
    """The world that templates are compiled in."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_SafeNamespace, dict=_make_dict
    )
    return environment


def _set_up(message: bytes) -> Handler:
    """`message` is JSON: the sources of the templates by name, and the most characters of a rendered prompt."""
    facts = json.loads(message)
    templates: dict[str, Template] = {}

    def compile_all() -> str:
        environment = make_environment()
        templates.update((name, environment.from_string(source)) for name, source in facts["templates"].items())
        return ""

    def render(template: str, variables: dict[str, Any]) -> str:
        parts, num_chars = [], 0
        for part in templates[template].generate(variables):
            num_chars += len(part)
            if num_chars > facts["max_chars"]:
                raise _TooLong
            parts.append(part)
        text = "".join(parts)
        text.encode()  # half a surrogate pair, written as \ud83d in JSON, is no text that can be tokenized
        return text

    def answer(message: bytes) -> bytes:
        kind, text = _outcome(compile_all if message == COMPILE else lambda: render(**json.loads(message)))
        return bytes([kind]) + text.encode("utf-8", "replace")

    return answer


def _outcome(work: Callable[[], str]) -> tuple[int, str]:
    try:
        return OK, work()
    except TemplateSyntaxError as error:
        return SYNTAX_ERROR, f"line {error.lineno}: {error.message}"
    except _Refusal as error:
        return REFUSED, str(error.message)[:MAX_ERROR_CHARS]
    except _TooLong:
        return TOO_LONG, ""
    except MemoryError:
        return FAILED, "MemoryError"
    except Exception as error:  # whatever a template can raise is its own fault, told to the client
        return FAILED, f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]


if __name__ == "__main__":
    serve(_set_up)
