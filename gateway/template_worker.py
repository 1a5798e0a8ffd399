"""Renders chat templates in a process of its own: `python -m headrace.gateway.template_worker`.

A template is a program that comes with the model's files. Jinja's sandbox keeps it from the machine, but not from
looping for hours or building a string of a terabyte, inside calls that no other thread can interrupt. So it runs here,
where the kernel ends the process when a rendering overruns its processor time, and refuses memory beyond a limit.

Standard input is a socket to `headrace.gateway.chat_template`. Both ways: u32 length (big-endian), then that many
bytes. First comes a JSON object with the templates and limits, then one per rendering. An answer is one byte (OK or one
of the errors below) and UTF-8 text: the rendered prompt, or what went wrong.

Rules and names in the templates' world are those of Hugging Face transformers: blocks trimmed, `raise_exception`,
`strftime_now`, `tojson` that does not escape HTML, `{% break %}`, `{% generation %}`.
"""

import json
import resource
import signal
import socket
import struct
from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

OK, SYNTAX_ERROR, REFUSED, FAILED, TOO_LONG = b"OSRFT"

LENGTH = struct.Struct("!I")
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


class _Worker:
    """One connection's loop: limits and templates once, then rendering after rendering."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._templates: dict[str, Template] = {}
        self._cpu_seconds = 0.0
        self._max_chars = 0

    def run(self) -> None:
        set_up = self._receive()
        if set_up is None:
            return
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (set_up["memory_bytes"],) * 2)
        self._cpu_seconds, self._max_chars = set_up["cpu_seconds"], set_up["max_chars"]
        self._answer(*self._limited(lambda: self._compile(set_up["templates"])))
        while (request := self._receive()) is not None:
            self._answer(*self._limited(lambda: self._render(**request)))

    def _limited(self, work: Callable[[], str]) -> tuple[int, str]:
        """Runs work under the clock: its default action, when it fires, is to end this process."""
        signal.setitimer(signal.ITIMER_PROF, self._cpu_seconds)
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
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _compile(self, sources: dict[str, str]) -> str:
        environment = make_environment()
        self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        return ""

    def _render(self, template: str, variables: dict[str, Any]) -> str:
        parts, num_chars = [], 0
        for part in self._templates[template].generate(variables):
            num_chars += len(part)
            if num_chars > self._max_chars:
                raise _TooLong
            parts.append(part)
        text = "".join(parts)
        text.encode()  # half a surrogate pair, written as \ud83d in JSON, is no text that can be tokenized
        return text

    def _receive(self) -> dict[str, Any] | None:
        """The next message, or None when the gateway is gone."""
        header = self._read(LENGTH.size)
        if header is None:
            return None
        body = self._read(LENGTH.unpack(header)[0])
        if body is None:
            return None
        message: dict[str, Any] = json.loads(body)
        return message

    def _read(self, size: int) -> bytes | None:
        data = bytearray()
        while len(data) < size:
            piece = self._connection.recv(min(size - len(data), 1 << 20))
            if not piece:
                return None
            data += piece
        return bytes(data)

    def _answer(self, kind: int, text: str) -> None:
        body = bytes([kind]) + text.encode("utf-8", "replace")
        self._connection.sendall(LENGTH.pack(len(body)) + body)


def main() -> None:
    """Serves the socket on standard input until the other end closes it."""
    # A Ctrl-C or a SIGTERM to the whole process group is the gateway's to handle: it still renders while it drains.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with socket.socket(fileno=0) as connection:
        _Worker(connection).run()


if __name__ == "__main__":
    main()
