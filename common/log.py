"""Structured logs on standard error, with the request's id wherever one is known: a JSON object a line, or, on a
terminal, a line to be read by people."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TextIO, cast


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


class _Sink:
    """Where lines go. What cannot be written is lost: whoever logs has something else to do than to fail by it."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        """Takes text in."""
        self._try(lambda stream: stream.write(text))

    def flush(self) -> None:
        """Writes it out."""
        self._try(lambda stream: stream.flush())

    def _try(self, act: Callable[[TextIO], object]) -> None:
        if self._stream is None:
            return
        try:
            act(self._stream)
        except BrokenPipeError:  # for good: nor shall the interpreter try again at its end
            with Path(os.devnull).open("w") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
        except OSError:  # a full disk, say, which may have room again
            return


def configure(level: str, *, service: str) -> None:
    """Sets logging up for this process; `level` is debug, info, warning or error."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *_rendered(people=sys.stderr is not None and sys.stderr.isatty()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=_to(sys.stderr),
    )
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(service=service)


def write_to(stream: TextIO) -> None:
    """Lines go there from now on."""
    structlog.configure(**{**structlog.get_config(), "logger_factory": _to(stream)})


def _to(stream: TextIO | None) -> structlog.WriteLoggerFactory:
    """A line is one write, so that those of several processes do not run into each other."""
    return structlog.WriteLoggerFactory(cast(TextIO, _Sink(stream)))


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


def bind(**values: str) -> None:
    """Binds values to every further line of this task, and of the tasks that it starts."""
    structlog.contextvars.bind_contextvars(**values)
