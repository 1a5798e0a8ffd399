import io
import json
import logging
import warnings
from typing import Any

import pytest
import structlog

from headrace.common.logging import LoggingConfig, configure_logging


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def restored_logging():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_every_event_is_one_json_line_with_the_four_keys_first():
    stream = io.StringIO()
    configure_logging("core", LoggingConfig(), stream)
    structlog.get_logger().info("model loaded", path="a\nb", seconds=1.5)
    assert stream.getvalue().count("\n") == 1
    (line,) = lines(stream)
    assert list(line)[:4] == ["timestamp", "level", "service", "event"]
    assert (line["level"], line["service"], line["event"]) == ("info", "core", "model loaded")
    assert (line["path"], line["seconds"]) == ("a\nb", 1.5)


def test_request_ids_that_are_bound_are_on_every_line_of_both_kinds():
    stream = io.StringIO()
    configure_logging("gateway", LoggingConfig(), stream)
    with structlog.contextvars.bound_contextvars(request_id="r1"):
        structlog.get_logger().info("ours")
        logging.getLogger("grpc").warning("theirs %d", 7)
    logging.getLogger("grpc").warning("after")
    assert [(line["event"], line.get("request_id")) for line in lines(stream)] == [
        ("ours", "r1"),
        ("theirs 7", "r1"),
        ("after", None),
    ]
    assert all(line["service"] == "gateway" and line["timestamp"] for line in lines(stream))


def test_the_level_holds_for_both_kinds():
    stream = io.StringIO()
    configure_logging("core", LoggingConfig(log_level="warning"), stream)
    structlog.get_logger().info("ours")
    logging.getLogger("x").info("theirs")
    assert stream.getvalue() == ""


def test_an_exception_stays_on_its_line():
    stream = io.StringIO()
    configure_logging("core", LoggingConfig(), stream)
    for log in (structlog.get_logger(), logging.getLogger("x")):
        try:
            raise ValueError("boom")
        except ValueError:
            log.exception("failed")
    assert stream.getvalue().count("\n") == 2
    assert all("ValueError: boom" in line["exception"] for line in lines(stream))


def test_warnings_become_log_lines():
    stream = io.StringIO()
    configure_logging("core", LoggingConfig(), stream)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("old", UserWarning, stacklevel=1)
        logging.captureWarnings(False)
    assert "old" in lines(stream)[0]["event"]


def test_a_terminal_gets_readable_lines_unless_json_is_asked_for():
    stream = Terminal()
    configure_logging("core", LoggingConfig(), stream)
    structlog.get_logger().info("model loaded")
    assert "model loaded" in stream.getvalue()
    assert not stream.getvalue().startswith("{")
    stream = Terminal()
    configure_logging("core", LoggingConfig(log_format="json"), stream)
    structlog.get_logger().info("model loaded")
    assert lines(stream)[0]["event"] == "model loaded"
