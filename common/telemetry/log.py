"""Structured logs on standard error, with the request's id wherever one is known: a JSON object a line, or, on a
terminal, a line to be read by people."""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TextIO

from common.telemetry.log_sink import Sink


@contextmanager
def _left_out(package: str) -> Iterator[None]:
    """Inside the block, `package` is not installed, unless somebody has imported it already."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]  # so Python marks what cannot be imported
    try:
        yield
    finally:
        del sys.modules[package]


with _left_out("rich"):  # structlog would draw tracebacks with it, at 0.06 s of CPU in every process that starts
    import structlog


class _Current:
    """Where this process's lines go."""

    sink = Sink(None)

    @classmethod
    def finish(cls) -> None:
        """As the process ends."""
        cls.sink.finish()


def configure(level: str, *, service: str) -> None:
    """Sets logging up for this process; `level` is debug, info, warning or error."""

    def with_service(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event["service"] = service  # no context variable: threads that others start have none
        return event

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            with_service,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _with_losses,
            *_rendered(people=sys.stderr is not None and sys.stderr.isatty()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=_to(sys.stderr),
    )
    structlog.contextvars.clear_contextvars()


def write_to(stream: TextIO) -> None:
    """Lines go there from now on."""
    structlog.configure(**{**structlog.get_config(), "logger_factory": _to(stream)})


def _to(stream: TextIO | None) -> Callable[..., _Lines]:
    """A line is one write, so that those of several processes do not run into each other."""
    sink = _Current.sink = Sink(stream)
    return lambda *_: _Lines(sink)


class _Lines:
    """What structlog writes rendered events with. Its own waits for another thread's line without end."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def msg(self, line: str) -> None:
        """Writes a line."""
        self._sink.write(line + "\n")
        self._sink.flush()

    debug = info = warning = error = critical = exception = msg


atexit.register(_Current.finish)


def _with_losses(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A line says how many there was no room for before it."""
    if lost := _Current.sink.lost:
        event["lines_lost"] = lost
    return event


def _rendered(*, people: bool) -> list[Any]:
    if people:
        return [structlog.dev.ConsoleRenderer()]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]


def get(name: str) -> Any:
    """A logger whose lines carry `name`."""
    return structlog.get_logger(component=name)


def bound(**values: str) -> AbstractContextManager[None]:
    """Binds values, such as a request id, to every line logged inside the block and the tasks it starts."""
    return structlog.contextvars.bound_contextvars(**values)


def bind(**values: object) -> None:
    """Binds values to every further line of this task, and of the tasks that it starts."""
    structlog.contextvars.bind_contextvars(**values)
