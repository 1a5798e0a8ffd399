"""Structured logs on stderr: one JSON object a line, or readable lines where stderr is a terminal.

Every line has timestamp, level, service and event. Services bind what belongs to a request with
`structlog.contextvars.bind_contextvars(request_id=...)`. Lines of libraries that use `logging` look the same.
"""

import logging
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from headrace.common.config import Section, setting

if TYPE_CHECKING:
    from structlog.typing import EventDict, Processor

_FIRST_KEYS = ("timestamp", "level", "service", "event")


@dataclass(frozen=True, slots=True)
class LoggingConfig(Section):
    """How much is logged, and in which form."""

    log_level: str = setting(
        "info", help="least important level that is logged", choices=("debug", "info", "warning", "error")
    )
    log_format: str = setting(
        "auto", help="auto is console where stderr is a terminal, else json", choices=("auto", "json", "console")
    )


def configure_logging(service: str, config: LoggingConfig, stream: TextIO | None = None) -> None:
    """Sends all logs of this process to the stream (stderr). Called once, before anything is logged."""
    import structlog

    stream = stream or sys.stderr
    as_json = config.log_format == "json" or (config.log_format == "auto" and not stream.isatty())
    level = getattr(logging, config.log_level.upper())

    def add_service(_logger: Any, _method: str, event: "EventDict") -> "EventDict":
        event.setdefault("service", service)
        return event

    common: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_service,
    ]
    # The console renderer prints exceptions itself; plainly, since a fancier one shows the values of local variables,
    # and prompts are among them.
    render: list[Processor] = (
        [structlog.processors.format_exc_info, _order_keys, structlog.processors.JSONRenderer()]
        if as_json
        else [structlog.dev.ConsoleRenderer(colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback)]
    )
    structlog.configure(
        processors=[*common, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*common, structlog.stdlib.ExtraAdder()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    logging.captureWarnings(True)


def _order_keys(_logger: Any, _method: str, event: "EventDict") -> "EventDict":
    """Puts what every line has first, so that logs can be read by eye too."""
    return {**{key: event[key] for key in _FIRST_KEYS if key in event}, **event}
