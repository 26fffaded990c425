"""The reasons that errors carry are those that docs/API.md lists, each with its status: no more, no fewer."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from common import errors
from tests.source_tree import Tree

ROOT = Path(__file__).resolve().parent.parent
STATUS = {kind.__name__: outcome.grpc.name for kind, outcome in errors.OUTCOMES.items()}
DEFAULTS = {kind.__name__: kind.default_reason for kind in errors.OUTCOMES}
WORD = re.compile(r"[A-Z0-9]+(_[A-Z0-9]+)*")
ROW = re.compile(r"^\| ([A-Z_]+) \| `([A-Z0-9_]+)` \| .+ \|$", re.MULTILINE)

Pair = tuple[str, str]
Nodes = tuple[ast.AST, ...]


def raised(tree: Tree) -> set[Pair]:
    """(status, reason) of every error that is made in a tree of sources."""
    modules = [module.nodes for name, module in tree.modules.items() if name != "common.errors"]
    constants = {name: words for nodes in [*modules, _errors()] for name, words in _assigned(nodes) if name.isupper()}
    for name, words in (pair for nodes in modules for pair in _rows(nodes)):
        constants[name] = constants.get(name, set()) | words
    return {pair for nodes in modules for pair in _made(nodes, constants | dict(_assigned(nodes)))}


def _errors() -> Nodes:
    return tuple(ast.walk(ast.parse((ROOT / "common/errors.py").read_text())))


def _assigned(nodes: Nodes) -> Iterator[tuple[str, set[str]]]:
    """Names that are bound to reasons, in a module or a function: `reason = "A" if video else "B"`."""
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and (words := _words(node.value)):
                yield target.id, words


def _rows(nodes: Nodes) -> Iterator[tuple[str, set[str]]]:
    """Fields of tables' rows that are bound to reasons: `Row(too_large="A")`, said as `reason=row.too_large`."""
    for node in nodes:
        if isinstance(node, ast.keyword) and node.arg not in (None, "reason") and (words := _words(node.value)):
            yield f".{node.arg}", words


def _words(node: ast.expr) -> set[str]:
    match node:
        case ast.Constant(value=str(word)) if WORD.fullmatch(word):
            return {word}
        case ast.IfExp():
            return _words(node.body) | _words(node.orelse)
        case _:
            return set()


def _made(nodes: Nodes, named: dict[str, set[str]]) -> Iterator[Pair]:
    for call in nodes:
        if not isinstance(call, ast.Call):
            continue
        name = ast.unparse(call.func).rpartition(".")[2]
        if name in STATUS and call.args:
            given = next((keyword.value for keyword in call.keywords if keyword.arg == "reason"), None)
            match given:
                case ast.Name(constant):
                    known = named.get(constant, set())
                case ast.Attribute(attr=field):
                    known = named.get(f".{field}", set())
                case _:
                    known = given and _words(given)
            assert given is None or known, f"{ast.unparse(call)}: what is its reason?"
            yield from ((STATUS[name], reason) for reason in known or {DEFAULTS[name]})


def test_what_is_raised_is_what_is_documented() -> None:
    listed = ROW.findall((ROOT / "docs/API.md").read_text())
    assert len(listed) == len(set(listed)), "listed twice"
    found = raised(Tree.read(ROOT, ("common", "encoder_service", "llm_service")))
    assert {"raised, not listed": found - set(listed), "listed, not raised": set(listed) - found} == {
        "raised, not listed": set(),
        "listed, not raised": set(),
    }


def test_a_reason_is_found_wherever_it_stands() -> None:
    sources = {
        "common/a": "raise InvalidInput('no', reason='PLAIN')",
        "common/b": "PLACE: Final = 'NAMED'",
        "common/c": "from common.b import PLACE\nraise errors.Unavailable('no', reason=PLACE, field='x')",
        "common/d": "def f(video):\n    reason = 'ONE' if video else 'OTHER'\n    raise NotFound('no', reason=reason)",
        "common/e": "raise DataLoss('no')",
        "common/f": "A = Row(large='ROW_A')\nB = Row(large='ROW_B')",
        "common/g": "raise InvalidInput('no', reason=row.large)",
    }
    assert raised(Tree.of(sources)) == {
        ("INVALID_ARGUMENT", "PLAIN"),
        ("UNAVAILABLE", "NAMED"),
        ("NOT_FOUND", "ONE"),
        ("NOT_FOUND", "OTHER"),
        ("DATA_LOSS", "DATA_LOSS"),
        ("INVALID_ARGUMENT", "ROW_A"),
        ("INVALID_ARGUMENT", "ROW_B"),
    }
