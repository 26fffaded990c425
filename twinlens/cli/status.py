"""`twinlens status`: how both services are doing: load, caches and stage times."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from twinlens.cli import watch
from twinlens.cli.connection import add_flags, endpoint
from twinlens.cli.tables import milliseconds, share, size, table
from twinlens.client import EncoderClient, LlmClient
from twinlens.errors import TwinlensError
from twinlens.v1 import (
    EncoderServiceGetInfoResponse,
    EncoderServiceGetLoadResponse,
    LlmServiceGetInfoResponse,
    LlmServiceGetLoadResponse,
    StageTiming,
)


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
        type=float,
        const=2.0,
        metavar="SECONDS",
        help="show queues, caches and throughput every so often (default: 2 s), until interrupted",
    )
    add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Asks the services and prints what they say. An encoder that does not answer makes the exit code 1."""
    if arguments.watch is not None:
        return _watch(arguments)
    with LlmClient(endpoint(arguments.address, arguments)) as llm:
        info, load = llm.get_info(), llm.get_load()
    report: dict[str, Any] = {"llm": {"address": arguments.address, **_pair(info, load)}, "encoders": []}
    sections = [_llm_text(arguments.address, info, load)]
    failures = 0
    for address in arguments.encoder or [known.address for known in load.encoders]:
        try:
            with EncoderClient(endpoint(address, arguments)) as encoder:
                its_info, its_load = encoder.get_info(), encoder.get_load()
        except TwinlensError as error:
            failures += 1
            report["encoders"].append({"address": address, "error": str(error)})
            sections.append(f"encoder {address}: {error}")
        else:
            report["encoders"].append({"address": address, **_pair(its_info, its_load)})
            sections.append(_encoder_text(address, its_info, its_load))
    print(json.dumps(report, indent=2) if arguments.json else "\n\n".join(sections))
    if failures:
        print(f"twinlens: {failures} of the encoders did not answer", file=sys.stderr)
    return min(failures, 1)


def _watch(arguments: argparse.Namespace) -> int:
    with ExitStack() as stack:
        llm = stack.enter_context(LlmClient(endpoint(arguments.address, arguments)))
        clients: dict[str, EncoderClient] = {}

        def ask(address: str) -> EncoderServiceGetLoadResponse | None:
            if address not in clients:
                clients[address] = stack.enter_context(EncoderClient(endpoint(address, arguments)))
            try:
                return clients[address].get_load()
            except TwinlensError:
                return None

        def sample() -> watch.Sample:
            load = llm.get_load()
            addresses = arguments.encoder or [known.address for known in load.encoders]
            return watch.Sample(time.monotonic(), load, {address: ask(address) for address in addresses})

        return watch.run(sample, arguments.watch)


def _pair(info: Message, load: Message) -> dict[str, Any]:
    return {
        "info": MessageToDict(info, preserving_proto_field_name=True),
        "load": MessageToDict(load, preserving_proto_field_name=True, always_print_fields_with_no_presence=True),
    }


def _llm_text(address: str, info: LlmServiceGetInfoResponse, load: LlmServiceGetLoadResponse) -> str:
    ended = f"{load.finished_requests} / {load.failed_requests} / {load.cancelled_requests}"
    hits = share(load.prefix_hit_tokens, load.prompt_tokens)
    blocks = share(load.kv_blocks_used, load.kv_blocks_total)
    rows = [
        ("requests waiting / running", f"{load.waiting} / {load.running}"),
        ("finished / failed / cancelled", ended),
        ("prompt / generated tokens", f"{load.prompt_tokens} / {load.generated_tokens}"),
        ("prefix cache hits", f"{load.prefix_hit_tokens} tokens ({hits})"),
        ("KV blocks in use", f"{load.kv_blocks_used} of {load.kv_blocks_total} ({blocks})"),
        ("embedding rows received", f"{load.rows_received}, of them {load.rows_shared} from shared memory"),
        ("items not asked for", f"{load.row_hits} were here, {load.items_covered} in the prefix cache"),
        ("encode streams / retries", f"{load.encode_attempts} / {load.encode_retries}"),
        ("embedding rows held", f"{size(load.row_bytes)} of {size(load.row_capacity_bytes)}"),
        ("preemptions / steps", f"{load.preemptions} / {load.steps}"),
    ]
    for known in load.encoders:
        state = "usable" if known.usable else "not usable"
        state += ", shared memory" if known.shared_memory else ""
        rows.append((f"encoder {known.address}", f"{state}, {known.in_flight} in flight"))
    title = f"LLM {address}: {info.model} ({info.architecture}) on {', '.join(info.devices)}"
    return _section(title, rows, load.stage_totals)


def _encoder_text(address: str, info: EncoderServiceGetInfoResponse, load: EncoderServiceGetLoadResponse) -> str:
    asked = load.store_hits + load.store_misses
    rows = [
        ("items queued / running", f"{load.queued_items} / {load.running_items}"),
        ("encoded / failed", f"{load.encoded_items} / {load.failed_items}"),
        ("open streams", str(load.open_streams)),
        ("ViT passes / patches", f"{load.vit_calls} / {load.vit_patches}"),
        ("store hits / misses", f"{load.store_hits} / {load.store_misses} ({share(load.store_hits, asked)})"),
        (
            "store",
            f"{load.store_entries} entries, {size(load.store_bytes)} of {size(load.store_capacity_bytes)}",
        ),
    ]
    title = f"encoder {address}: {info.model} ({info.architecture}) on {', '.join(info.devices)}"
    return _section(title, rows, load.stage_totals)


def _section(title: str, rows: Iterable[tuple[str, str]], stages: Iterable[StageTiming]) -> str:
    lines = [title, *(f"  {name:<30} {value}" for name, value in rows)]
    times = [(timing.stage, milliseconds(timing.seconds)) for timing in stages]
    if times:
        shown = table([("stage", "total"), *times])
        lines += ["", *(f"  {line}" for line in shown.splitlines())]
    return "\n".join(lines)
