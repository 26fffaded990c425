"""Both services and the gateway in the foreground until Ctrl-C, which lets running requests finish.

The first encoder listens on port 7001, the LLM service on 7002, further encoders on 7003 and up, the gateway on 8000.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import NoReturn

from tools.launcher import Service

_LLM_PORT = 7002
_DEMO_MODEL = "models/demo"

Changes = SimpleQueue[None]
"""What wakes the main thread. Unlike an event, it may be put into by a signal that interrupts the waiting for it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs until a signal comes (exit code 0), or until a service ends by itself (1)."""
    arguments = _parse(argv)
    changes: Changes = SimpleQueue()
    services: list[Service] = []
    signals = _Signals(changes, services)
    commands = _commands(arguments)
    print(f"starting {', '.join(name for name, _, _ in commands)} with {arguments.model} …", flush=True)
    with ExitStack() as running:
        for name, module, flags in commands:
            services.append(running.enter_context(Service(name, module, flags, on_change=partial(changes.put, None))))
        _watch(services, changes, signals)
        if signals.came:
            print("up: finishing what is running; Ctrl-C again ends at once", file=sys.stderr)
        else:
            names = ", ".join(service.name for service in services if service.ended)
            print(f"up: {names} ended by itself; stopping the rest", file=sys.stderr)
    return 0 if signals.came else 1


class _Signals:
    """The first signal asks for an orderly stop, the second kills."""

    def __init__(self, changes: Changes, services: Sequence[Service]) -> None:
        self.came = False
        self._changes = changes
        self._services = services
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._take)

    def _take(self, *_: object) -> None:
        if self.came:
            for service in self._services:
                service.kill()
        self.came = True
        self._changes.put(None)


def _watch(services: Sequence[Service], changes: Changes, signals: _Signals) -> None:
    """Tells which services have begun to serve; returns on a signal, or when a service has ended."""
    waiting = list(services)
    while not signals.came and not any(service.ended for service in services):
        changes.get()
        for service in [each for each in waiting if each.address]:
            waiting.remove(service)
            print(f"{service.name} serves on {service.address}", flush=True)
            if not waiting:
                print(f'ask with: {_client()} ask --image F "question"     stop with: Ctrl-C', flush=True)


def _client() -> Path:
    """The command line client beside the Python that runs this."""
    return Path(os.path.relpath(Path(sys.executable).parent / "twinlens"))


def _commands(arguments: argparse.Namespace) -> list[tuple[str, str, list[str]]]:
    """Name, module and flags of each service. They are stopped from the last on: gateway, LLM service, encoders."""
    model = ["--model", arguments.model]
    encoders = [f"{arguments.host}:{port}" for port in _encoder_ports(arguments.encoders)]
    commands = [
        (f"encoder {number}", "encoder_service", [*model, "--listen", address])
        for number, address in enumerate(encoders, start=1)
    ]
    llm = f"{arguments.host}:{_LLM_PORT}"
    flags = ["--listen", llm, "--encoders", ",".join(encoders)]
    commands.append(("LLM", "llm_service", [*model, *flags, *_parallel(arguments.tp)]))
    if arguments.http_port:
        http = f"{arguments.host}:{arguments.http_port}"
        commands.append(("gateway", "gateway", ["--listen", http, "--llm", llm]))
    return commands


def _parallel(ranks: int) -> list[str]:
    return ["--tp", str(ranks)] if ranks > 1 else []


def _encoder_ports(count: int) -> list[int]:
    """7001, then 7003 and up: 7002 is the LLM service's.

    >>> _encoder_ports(3)
    [7001, 7003, 7004]
    """
    return [7001, *range(7003, 7002 + count)]


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Ends the program."""
        self.exit(2, f"{self.prog}: {message}\n")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(prog="make up", description=__doc__, allow_abbrev=False)
    default = "(default: %(default)s)"
    parser.add_argument("--model", default=_DEMO_MODEL, help=f"a checkpoint's folder or hub name {default}")
    parser.add_argument("--host", default="127.0.0.1", help=f"the address to listen on {default}")
    parser.add_argument("--encoders", type=int, default=1, help=f"encoder processes {default}")
    parser.add_argument("--http-port", type=int, default=8000, help=f"the gateway's port; 0: no gateway {default}")
    parser.add_argument("--tp", type=int, default=1, help=f"tensor-parallel ranks {default}")
    arguments = parser.parse_args(argv)
    if arguments.encoders < 1 or arguments.tp < 1:
        parser.error("--encoders and --tp are at least 1")
    if arguments.model == _DEMO_MODEL and not Path(_DEMO_MODEL).is_dir():
        parser.error(f"{_DEMO_MODEL} is not in this folder: name a checkpoint with --model (MODEL=… for make)")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
