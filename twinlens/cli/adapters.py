"""`twinlens adapters`: lists, loads and unloads the LoRA adapters of LLM services. If one service refuses, the others
are asked nevertheless, and the exit code is 1."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any

from twinlens.cli import advice
from twinlens.cli.connection import add_flags, endpoint
from twinlens.cli.tables import table
from twinlens.client import LlmClient
from twinlens.errors import NotReachableError, TwinlensError

_HEADING = ["service", "adapter", "rank", "in flight"]


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser("adapters", help="show, add and remove LoRA adapters", description=__doc__)
    parser.set_defaults(run=run)
    parser.add_argument(
        "--llm",
        dest="addresses",
        action="append",
        metavar="ADDR",
        help="a service to ask; repeatable, since each has adapters of its own (default: 127.0.0.1:7002)",
    )
    parser.add_argument(
        "--unload", action="append", default=[], metavar="NAME", help="remove a name; repeatable, before any --load"
    )
    parser.add_argument(
        "--load",
        action="append",
        default=[],
        type=_named,
        metavar="NAME=FOLDER",
        help="read one from a folder below the service's --lora-dir; repeatable",
    )
    add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Carries the command out at each service, and prints the adapters of all of them."""
    rows, failures, unreachable = [_HEADING], 0, 0
    addresses = arguments.addresses or ["127.0.0.1:7002"]
    for address in addresses:
        its = endpoint(address, arguments)
        try:
            with LlmClient(its) as llm:
                failures += _change(llm, address, arguments)
                rows += [[address, each.name, str(each.rank), str(each.in_flight)] for each in llm.get_info().adapters]
        except NotReachableError as error:
            unreachable += 1
            print(f"twinlens: no service answers at {address}: {advice.why(error, its)}", file=sys.stderr)
        except TwinlensError as error:
            failures += 1
            print(f"twinlens: {address}: {advice.why(error, its)}", file=sys.stderr)
    if len(rows) > 1:
        print(table(rows))
    elif unreachable < len(addresses):
        print("no adapters")
    if unreachable == len(addresses):
        return 3
    return int(failures + unreachable > 0)


def _change(llm: LlmClient, address: str, arguments: argparse.Namespace) -> int:
    """How many changes the service refuses. Raises NotReachableError."""
    changes = [(name, partial(llm.unload_adapter, name)) for name in arguments.unload]
    changes += [(name, partial(llm.load_adapter, name, folder)) for name, folder in arguments.load]
    refused = 0
    for name, change in changes:
        try:
            change()
        except NotReachableError:
            raise
        except TwinlensError as error:
            refused += 1
            print(f"twinlens: {address}: {name}: {advice.why(error, llm.endpoint)}", file=sys.stderr)
    return refused


def _named(word: str) -> tuple[str, str]:
    name, equals, folder = word.partition("=")
    if not (name and equals and folder):
        raise argparse.ArgumentTypeError(f"{word!r} is not NAME=FOLDER")
    return name, folder
