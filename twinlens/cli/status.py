"""`twinlens status`: how both services are doing: load, caches and stage times."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from twinlens.cli import advice, sections, watch
from twinlens.cli.connection import add_encoder_flags, add_flags, bounded, encoder_endpoint, endpoint
from twinlens.client import EncoderClient, LlmClient
from twinlens.errors import NotReachableError, TwinlensError
from twinlens.v1 import EncoderServiceGetInfoResponse, EncoderServiceGetLoadResponse, LlmServiceGetLoadResponse

Load = TypeVar("Load", EncoderServiceGetLoadResponse, LlmServiceGetLoadResponse)


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser("status", help="show both services' load, caches and stage times", description=__doc__)
    parser.set_defaults(run=run)
    parser.add_argument("--llm", dest="address", metavar="ADDR", default="127.0.0.1:7002", help="default: %(default)s")
    parser.add_argument(
        "--encoder",
        action="append",
        metavar="ADDR",
        help="an encoder to ask; repeatable (default: those that the LLM service reports)",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument(
        "--watch",
        nargs="?",
        type=bounded(float, 0.1, 1e6),
        const=2.0,
        metavar="SECONDS",
        help="show queues, caches and throughput every so often (default: 2 s), until interrupted",
    )
    add_flags(parser)
    add_encoder_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Asks the services and prints their answers. The exit code is 1 if an encoder does not answer."""
    if arguments.watch is not None:
        return _watch(arguments)
    with LlmClient(endpoint(arguments.address, arguments)) as llm:
        info, load = llm.get_info(), llm.get_load()
    report: dict[str, Any] = {"llm": {"address": arguments.address, **_pair(info, load)}, "encoders": []}
    texts = [sections.llm(arguments.address, info, load)]
    failures = 0
    for address in arguments.encoder or _addresses(load):
        said = _ask(address, arguments)
        if isinstance(said, str):
            failures += 1
            report["encoders"].append({"address": address, "error": said})
            texts.append(f"encoder {address}: {said}")
        else:
            report["encoders"].append({"address": address, **_pair(*said)})
            texts.append(sections.encoder(address, *said))
    print(json.dumps(report, indent=2) if arguments.json else "\n\n".join(texts))
    if failures:
        print(f"twinlens: {failures} of the encoders did not answer", file=sys.stderr)
    return min(failures, 1)


def _watch(arguments: argparse.Namespace) -> int:
    """Raises TwinlensError if the LLM service does not answer at first; later the table says so."""
    with ExitStack() as stack:
        llm = stack.enter_context(LlmClient(endpoint(arguments.address, arguments)))
        encoders: dict[str, EncoderClient] = {}
        known = _addresses(llm.get_load())

        def ask(address: str) -> EncoderServiceGetLoadResponse:
            if address not in encoders:
                encoders[address] = stack.enter_context(EncoderClient(encoder_endpoint(address, arguments)))
            return encoders[address].get_load()

        def sample() -> watch.Sample:
            nonlocal known
            load = _answer(llm.get_load)
            known = known if load is None else _addresses(load)
            asked = {each: _answer(partial(ask, each)) for each in arguments.encoder or known}
            return watch.Sample(time.monotonic(), load, asked)

        return watch.run(sample, arguments.watch)


def _ask(
    address: str, arguments: argparse.Namespace
) -> tuple[EncoderServiceGetInfoResponse, EncoderServiceGetLoadResponse] | str:
    """An encoder's description and load, or why there is none. Raises OSError for a file that cannot be read."""
    try:
        its = encoder_endpoint(address, arguments)
    except ValueError as error:  # for example, a token that may not be sent there
        return str(error)
    try:
        with EncoderClient(its) as encoder:
            return encoder.get_info(), encoder.get_load()
    except NotReachableError as error:
        return f"{error.code.name}: {advice.why(error, its, of_encoder=True)}"
    except TwinlensError as error:
        return advice.why(error, its, of_encoder=True)


def _addresses(load: LlmServiceGetLoadResponse) -> list[str]:
    return [encoder.address for encoder in load.encoders]


def _answer(ask: Callable[[], Load]) -> Load | None:
    try:
        return ask()
    except (TwinlensError, ValueError):
        return None


def _pair(info: Message, load: Message) -> dict[str, Any]:
    return {
        "info": MessageToDict(info, preserving_proto_field_name=True),
        "load": MessageToDict(load, preserving_proto_field_name=True, always_print_fields_with_no_presence=True),
    }
