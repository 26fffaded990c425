"""`twinlens health`: exit code 0 if a server is serving, 1 if it says otherwise, 3 if it does not answer."""

from __future__ import annotations

import argparse
from typing import Any

from twinlens.cli.connection import add_flags, bounded, endpoint
from twinlens.health import Health, check


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser("health", help="ask a server whether it is serving", description=__doc__)
    parser.set_defaults(run=run)
    parser.add_argument("address", metavar="ADDR", help="for example 127.0.0.1:7001")
    parser.add_argument("--service", default="", help="for example twinlens.v1.LlmService (default: the server)")
    parser.add_argument(
        "--timeout",
        type=bounded(float, 0.001),
        default=5.0,
        metavar="SECONDS",
        help="default: %(default)g",
    )
    add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Asks once and prints the answer."""
    health = check(endpoint(arguments.address, arguments), arguments.service, timeout=arguments.timeout)
    print(health.name)
    return 0 if health is Health.SERVING else 1
