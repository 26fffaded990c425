"""White space in JSON that a schema holds an answer to. JSON has no bound for it, and a model that is not sure how to
go on may write line after line without a word, until its answer is as long as it may be."""

from __future__ import annotations

from collections.abc import Mapping

MOST = 32
"""Characters between two tokens of JSON: a newline, and indentation of seven levels of four or fifteen of two. Deeper
levels are indented less than usual, in equivalent JSON."""
SETTINGS = "x-guidance"
"""llguidance's settings in a schema; if a caller sends some, they apply."""
PATTERN = rf"[\x20\x0A\x0D\x09]{{1,{MOST}}}"


def with_short_gaps(schema: Mapping[str, object]) -> dict[str, object]:
    """The same schema, of JSON with no longer white space than that.

    >>> list(with_short_gaps({"type": "array"})), with_short_gaps({"x-guidance": {}})
    (['x-guidance', 'type'], {'x-guidance': {}})
    """
    return {SETTINGS: {"whitespace_pattern": PATTERN}, **schema}


def leniently(schema: Mapping[str, object]) -> dict[str, object]:
    """The same schema, of which counts what can be compiled.

    >>> leniently({"type": "array"})["x-guidance"]["lenient"], leniently({"x-guidance": {"lenient": False}})
    (True, {'x-guidance': {'lenient': False}})
    """
    settings = schema.get(SETTINGS, {"whitespace_pattern": PATTERN})
    return {**schema, SETTINGS: {"lenient": True, **settings} if isinstance(settings, Mapping) else settings}
