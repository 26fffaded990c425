"""The command line: `twinlens ask`, `transcribe`, `embed`, `batch`, `status`, `adapters`, `health`.

Exit codes: 0 done; 1 the service refused or failed the request; 2 the command was not understood, or names a
file that cannot be read; 3 no service answered; 4 another `twinlens batch` writes the output; 130 interrupted.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from twinlens._version import __version__
from twinlens.cli import adapters, advice, ask, batch, embed, health, status, transcribe
from twinlens.cli.connection import endpoint
from twinlens.errors import NotReachableError, TwinlensError

DONE, FAILED, MISUSED, NOT_REACHABLE, INTERRUPTED = 0, 1, 2, 3, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line (default: the process's own) and returns its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a letter that the terminal has not must not end the answer
    try:
        try:
            return _run(_parser().parse_args(argv))
        finally:
            _flush()
    except BrokenPipeError:  # the reader of our output has left, as `head` does
        return FAILED
    except OSError as error:
        named = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        return _fail(MISUSED, named)
    except ValueError as error:
        return _fail(MISUSED, str(error))
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(arguments: argparse.Namespace) -> int:
    try:
        return int(arguments.run(arguments))
    except TwinlensError as error:
        sources = [source for _, source in getattr(arguments, "media", ())]
        told = advice.why(error, endpoint(arguments.address, arguments), sources=sources)
        if isinstance(error, NotReachableError):
            return _fail(NOT_REACHABLE, f"no service answers at {arguments.address}: {told}")
        return _fail(FAILED, told)


def _flush() -> None:
    """Flushes output. What cannot be written is dropped, or the interpreter would try again at exit."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        raise


def _fail(code: int, text: str) -> int:
    print(f"twinlens: {text}", file=sys.stderr)
    return code


class _Parser(argparse.ArgumentParser):
    """Options must be spelt out, in subcommands as well: an abbreviation may mean another option tomorrow. Errors are
    one line, without usage."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Reports unknown arguments by the subcommand instead of the main parser, whose help only lists commands."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Ends the program."""
        _, unknown, first = message.partition("unrecognized arguments: ")
        if unknown and not first.startswith("-"):
            message += "; a question of several words is put in quotes"
        self.exit(MISUSED, f"{self.prog}: {message} (see `{self.prog} --help`)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="twinlens",
        description="Asks a Twinlens service about pictures, videos and sounds, and shows how it is doing.",
        epilog="Exit codes: 0 done, 1 refused or failed, 2 misused, 3 no service answered, 4 another `twinlens batch`"
        " writes the output, 130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"twinlens {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    for command in (ask, transcribe, embed, batch, status, adapters, health):
        command.add_parser(commands)
    return parser
