"""Reads Python sources without importing them: which module imports which, and where."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Import:
    """One imported name, in full, for example `common.errors` or `twinlens.v1.Media`."""

    name: str
    deferred: bool  # inside a function: not run when the module is imported
    typing_only: bool  # under `if TYPE_CHECKING`: never run


@dataclass(frozen=True)
class Module:
    """A module's syntax tree under its dotted name; a package goes by its own name."""

    name: str
    package: bool
    syntax: ast.Module

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All of its syntax."""
        return tuple(ast.walk(self.syntax))

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        """Everything that it imports."""
        return tuple(self._walk(self.syntax, deferred=False, typing_only=False))

    def _walk(self, node: ast.AST, *, deferred: bool, typing_only: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                for name in self._names(child):
                    yield Import(name, deferred, typing_only)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                for part, guarded in ((child.body, True), (child.orelse, typing_only)):
                    for statement in part:
                        yield from self._walk(ast.Module([statement], []), deferred=deferred, typing_only=guarded)
            elif not isinstance(child, ast.expr):  # which holds no statement
                inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                yield from self._walk(child, deferred=deferred or inside, typing_only=typing_only)

    def _names(self, node: ast.Import | ast.ImportFrom) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
            return
        base = node.module or ""
        if node.level:
            parts = self.name.split(".")
            up = node.level - (1 if self.package else 0)
            base = ".".join([*parts[: len(parts) - up], *([base] if base else [])])
        yield from (f"{base}.{alias.name}" for alias in node.names)


class Tree:
    """The modules of some packages."""

    def __init__(self, modules: Iterable[Module]) -> None:
        self.modules: Mapping[str, Module] = {module.name: module for module in modules}

    @classmethod
    def read(cls, root: Path, packages: Iterable[str]) -> Tree:
        """Parses every module of the packages under `root`."""
        paths = [path for package in packages for path in sorted((root / package).rglob("*.py"))]
        return cls(_parse(path.relative_to(root), path.read_text("utf-8")) for path in paths)

    @classmethod
    def of(cls, sources: Mapping[str, str]) -> Tree:
        """A tree made up for a test: `of({"common/errors": "import grpc"})`."""
        return cls(_parse(Path(f"{name}.py"), text) for name, text in sources.items())

    def matching(self, *patterns: str) -> list[Module]:
        """The modules whose names fit a pattern; `a.b.*` also means `a.b` itself."""
        return [each for each in self.modules.values() if any(fits(each.name, form) for form in patterns)]

    def module_of(self, name: str) -> str | None:
        """The module of this tree that an imported name is, or is in; None for a foreign one."""
        while name:
            if name in self.modules:
                return name
            name = name.rpartition(".")[0]
        return None

    def loads(self, name: str, foreign: set[str]) -> list[str] | None:
        """How importing a module loads one of some foreign packages: the chain of names; None if not."""
        chains = [[name]]
        seen = {name}
        while chains:
            chain = chains.pop()
            for each in self.modules[chain[-1]].imports:
                if each.deferred or each.typing_only:
                    continue
                if each.name.partition(".")[0] in foreign:
                    return [*chain, each.name]
                for inner in self._executed(each.name):
                    if inner not in seen:
                        seen.add(inner)
                        chains.append([*chain, inner])
        return None

    def _executed(self, name: str) -> Iterator[str]:
        """The modules that run when a name is imported: its own, and the packages around it."""
        found = self.module_of(name)
        while found:
            if found in self.modules:
                yield found
            found = found.rpartition(".")[0]


def fits(name: str, pattern: str) -> bool:
    """Whether a dotted name fits a pattern, as `Tree.matching` reads it.

    >>> fits("a.b", "a.b.*"), fits("a.b.c", "a.b.*"), fits("a.bc", "a.b.*")
    (True, True, False)
    """
    return fnmatchcase(name, pattern) or (pattern.endswith(".*") and name == pattern[:-2])


def _parse(path: Path, text: str) -> Module:
    parts = path.with_suffix("").parts
    package = parts[-1] == "__init__"
    return Module(".".join(parts[:-1] if package else parts), package, ast.parse(text, str(path)))
