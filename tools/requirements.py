"""Prints what an extra of pyproject.toml asks for, with the base dependencies, one requirement on a line.

An image build uses it to install dependencies before the sources are there. Usage: requirements.py EXTRA…
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

_PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def requirements(extras: Sequence[str]) -> Iterator[str]:
    """The base dependencies and those of the extras; an extra that names other extras brings them along.

    Raises KeyError for an extra that there is not.
    """
    project = tomllib.loads(_PYPROJECT.read_text("utf-8"))["project"]
    yield from project["dependencies"]
    waiting = list(extras)
    while waiting:
        for line in project["optional-dependencies"][waiting.pop()]:
            own = re.fullmatch(rf"{project['name']}\[(.+)\]", line)
            if own:
                waiting += own[1].split(",")
            else:
                yield line


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
