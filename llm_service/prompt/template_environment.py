"""The environment of chat templates: Jinja as Hugging Face's templates expect it, sandboxed, and keeping track of
callers' texts in whatever a template makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import partial, wraps
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from llm_service.prompt.caller_text import CallerTexts, made_anew

_TEXTS: ContextVar[CallerTexts | None] = ContextVar("texts", default=None)
_MADE_ANEW = (
    *("e", "escape", "forceescape", "float", "int", "striptags", "title", "urlencode", "urlize", "wordcount"),
    "wordwrap",
)
"""Filters that look into a string by other ways than a string's own."""


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles templates, and runs them `with_texts`."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
        self.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        self.filters["tojson"] = _to_json
        for name, made in self.filters.items():
            self.filters[name] = _reading(partial(made_anew, made) if name in _MADE_ANEW else made, made)

    def call(self, context: Context, called: Any, /, *given: Any, **options: Any) -> Any:
        """The result of a function or method."""
        return _read(super().call(context, called, *given, **options))

    @staticmethod
    def concat(texts: Iterable[str]) -> str:
        """The output of a template, a macro or a block."""
        joined: str = _read("".join(texts))
        return joined

    def template_and_names(self, source: str) -> tuple[jinja2.Template, frozenset[str]]:
        """A template, and the variables that it asks for. Raises TemplateSyntaxError."""
        tree = self.parse(source)
        names = frozenset(meta.find_undeclared_variables(tree))
        return self.from_string(_Joining().visit(tree)), names


@contextmanager
def with_texts() -> Iterator[CallerTexts]:
    """Within this, templates know these texts."""
    texts = CallerTexts()
    token = _TEXTS.set(texts)
    try:
        yield texts
    finally:
        _TEXTS.reset(token)


class _Joining(NodeTransformer):
    """Replaces `a ~ b` by a filter, since Jinja's own operator returns plain strings."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 # as its base calls it
        """The filter in its place."""
        values = nodes.List([self.visit(each) for each in node.nodes], lineno=node.lineno)
        return nodes.Filter(values, "join", [], [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """Text between `generation` and `endgeneration`, which is marked for training, is ordinary text here."""

    tags = {"generation"}  # noqa: RUF012 # as its base has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _read(value: Any) -> Any:
    texts = _TEXTS.get()
    return texts.read(value) if texts is not None and type(value) is str else value


def _reading(work: Callable[..., Any], made: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(made)
    def reading(*given: Any, **options: Any) -> Any:
        return _read(work(*given, **options))

    return reading


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, *, ensure_ascii: bool = False, **options: Any) -> str:
    text, texts = json.dumps(value, ensure_ascii=False, **options), _TEXTS.get()
    return text if texts is None else texts.within_json(text, ensure_ascii=ensure_ascii)
