"""Structured logs on standard error, with the request's id wherever one is known: a JSON object a line, or, on a
terminal, a line to be read by people."""

from __future__ import annotations

import logging
import sys
from contextlib import AbstractContextManager
from typing import Any

import structlog


def configure(level: str, *, service: str) -> None:
    """Sets logging up for this process; `level` is debug, info, warning or error."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *_rendered(people=sys.stderr.isatty()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(service=service)


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
