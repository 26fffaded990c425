"""Both services and the gateway in the foreground until Ctrl-C, which lets running requests finish.

The first encoder listens on port 7001, the LLM service on the next, further encoders on those after it, the gateway
on 8000.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import NoReturn

from tools.launcher import Service

_DEMO_MODEL = "models/demo"
_GATEWAY, _LLM = "gateway", "LLM"
_DEFAULT_LLM = "127.0.0.1:7002"
"""Where the client asks unless told otherwise."""

Changes = SimpleQueue[None]
"""What wakes the main thread. Unlike an event, it may be put into by a signal that interrupts the waiting for it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs until a signal comes (exit code 0), or until a service ends by itself (1)."""
    arguments = _parse(argv)
    commands = _commands(arguments)
    if taken := [address for _, _, flags in commands for address in _listened(flags) if _is_taken(address)]:
        print(
            f"make up: another program listens on {' and '.join(taken)}; stop it, or choose other ports:"
            " make up ARGS='--port 7101 --http-port 8100'",
            file=sys.stderr,
        )
        return 1
    changes: Changes = SimpleQueue()
    services: list[Service] = []
    signals = _Signals(changes, services)
    print(f"starting {', '.join(name for name, _, _ in commands)} with {arguments.model} …", flush=True)
    with ExitStack() as running:
        models = [command for command in commands if command[0] != _GATEWAY]
        # A gateway, which is the last, would serve at once: it begins when there is what it asks.
        for part in (models, commands[len(models) :]):
            for name, module, flags in part:
                service = Service(name, module, flags, on_change=partial(changes.put, None))
                services.append(running.enter_context(service))
            if not _all_serve(services, changes, signals):
                break
        else:
            _tell(services)
            while _go_on(services, signals):
                changes.get()
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


def _go_on(services: Sequence[Service], signals: _Signals) -> bool:
    """No signal has come, and no service has ended."""
    return not signals.came and not any(service.ended for service in services)


def _all_serve(services: Sequence[Service], changes: Changes, signals: _Signals) -> bool:
    """Waits until these serve; False on a signal, or when a service has ended."""
    while _go_on(services, signals) and not all(service.address for service in services):
        changes.get()
    return _go_on(services, signals)


def _tell(services: Sequence[Service]) -> None:
    """Where all of them serve, which nobody is told before: a start that fails claims nothing."""
    for service in services:
        print(f"{service.name} serves on {service.address}")
    for page in [each.address for each in services if each.name == _GATEWAY]:
        print(f"drop pictures on: http://{page}/")
    llm = next((each.address for each in services if each.name == _LLM), _DEFAULT_LLM)
    print(f'ask with: {_client()} ask {_where(llm)}--image F "question"     stop with: Ctrl-C', flush=True)


def _client() -> Path:
    """The command line client beside the Python that runs this."""
    return Path(os.path.relpath(Path(sys.executable).parent / "twinlens"))


def _where(llm: str) -> str:
    """What has the client ask this LLM service, where it would ask another one by itself.

    >>> _where("127.0.0.1:7002"), _where("127.0.0.1:7102")
    ('', '--llm 127.0.0.1:7102 ')
    """
    return "" if llm == _DEFAULT_LLM else f"--llm {llm} "


def _commands(arguments: argparse.Namespace) -> list[tuple[str, str, list[str]]]:
    """Name, module and flags of each service. They are stopped from the last on: gateway, LLM service, encoders."""
    model = ["--model", arguments.model]
    encoders = [f"{arguments.host}:{port}" for port in _encoder_ports(arguments.port, arguments.encoders)]
    commands = [
        (f"encoder {number}", "encoder_service", [*model, "--listen", address])
        for number, address in enumerate(encoders, start=1)
    ]
    llm = f"{arguments.host}:{arguments.port + 1}"
    flags = ["--listen", llm, "--encoders", ",".join(encoders)]
    commands.append((_LLM, "llm_service", [*model, *flags, *_parallel(arguments.tp)]))
    if arguments.http_port:
        http = f"{arguments.host}:{arguments.http_port}"
        commands.append((_GATEWAY, "gateway", ["--listen", http, "--llm", llm]))
    return commands


def _parallel(ranks: int) -> list[str]:
    return ["--tp", str(ranks)] if ranks > 1 else []


def _encoder_ports(first: int, count: int) -> list[int]:
    """The first, and from the third on: the second is the LLM service's.

    >>> _encoder_ports(7001, 3)
    [7001, 7003, 7004]
    """
    return [first, *range(first + 2, first + 1 + count)]


def _listened(flags: Sequence[str]) -> list[str]:
    """The address that a service is told to listen on."""
    return [value for flag, value in pairwise(flags) if flag == "--listen"]


def _is_taken(address: str) -> bool:
    """Whether another program listens there; what else may be wrong with an address, its service says."""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host.strip("[]"), int(port)), family=family):
            return False
    except OSError as error:
        return error.errno == errno.EADDRINUSE


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
    parser.add_argument("--port", type=int, default=7001, help=f"the first encoder's port {default}")
    parser.add_argument("--encoders", type=int, default=1, help=f"encoder processes {default}")
    parser.add_argument("--http-port", type=int, default=8000, help=f"the gateway's port; 0: no gateway {default}")
    parser.add_argument("--tp", type=int, default=1, help=f"tensor-parallel ranks {default}")
    arguments = parser.parse_args(argv)
    if arguments.encoders < 1 or arguments.tp < 1:
        parser.error("--encoders and --tp are at least 1")
    if not (0 < arguments.port < 65536 - arguments.encoders and 0 <= arguments.http_port < 65536):
        parser.error("a port is a number up to 65535")
    if arguments.model == _DEMO_MODEL and not Path(_DEMO_MODEL).is_dir():
        parser.error(f"{_DEMO_MODEL} is not in this folder: name a checkpoint with --model (MODEL=… for make)")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
