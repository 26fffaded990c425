"""The sections of `twinlens status` for each service, as text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from twinlens.cli.tables import milliseconds, share, size, table
from twinlens.v1 import (
    DataType,
    EncoderServiceGetInfoResponse,
    EncoderServiceGetLoadResponse,
    EncoderStatus,
    LlmServiceGetInfoResponse,
    LlmServiceGetLoadResponse,
    SharedStoreLoad,
    StageTiming,
    Transport,
    Weights,
)

_DIGITS = 12
"""Of a digest: enough to see whether two are the same."""


def llm(address: str, info: LlmServiceGetInfoResponse, load: LlmServiceGetLoadResponse) -> str:
    """An LLM service: its requests, caches, and the encoders that it knows."""
    ended = f"{load.finished_requests} / {load.failed_requests} / {load.cancelled_requests}"
    hits = share(load.prefix_hit_tokens, load.prefix_query_tokens)
    blocks = share(load.kv_blocks_used, load.kv_blocks_total)
    rows = [
        ("release", f"{info.version}, for encoders with digest {info.encoder_digest[:_DIGITS]}"),
        ("context / ranks", f"{info.context_tokens} tokens / {info.tensor_parallel}"),
        *((("weights", _weights(info.weights)),) if info.HasField("weights") else ()),
        ("requests waiting / running", f"{load.waiting} / {load.running}, {load.waiting_tokens} prompt tokens wait"),
        ("finished / failed / cancelled", f"{ended}, of the failed {load.refused_requests} refused at once"),
        ("sessions kept warm", str(load.sessions)),
        ("prompt / generated tokens", f"{load.prompt_tokens} / {load.generated_tokens}"),
        ("prefix cache hits", f"{load.prefix_hit_tokens} tokens ({hits})"),
        (
            "KV blocks in use",
            f"{load.kv_blocks_used} of {load.kv_blocks_total} ({blocks}), {load.kv_blocks_cached} cached",
        ),
        *(_host_blocks(load) if load.kv_host_blocks_total else ()),
        *(_exchanged(load) if load.prefills_elsewhere or load.kv_blocks_lent else ()),
        *(_states(load) if load.state_slots else ()),
        ("embedding rows received", _received(load)),
        ("items not asked for", f"{load.row_hits} were here, {load.items_covered} in the prefix cache"),
        ("headers known from before", str(load.headers_known)),
        ("encode streams / retries", f"{load.encode_attempts} / {load.encode_retries}"),
        ("embedding rows held", f"{size(load.row_bytes)} of {size(load.row_capacity_bytes)}"),
        ("preemptions / steps", f"{load.preemptions} / {load.steps}, {load.graph_steps} of them by graphs"),
        *(_drafts(load) if load.draft_tokens else ()),
        *((f"encoder {known.address}", _state(known)) for known in load.encoders),
    ]
    title = f"LLM {address}: {info.model} ({info.architecture}) on {', '.join(info.devices)}"
    return _section(title, rows, load.stage_totals)


def _host_blocks(load: LlmServiceGetLoadResponse) -> list[tuple[str, str]]:
    copied = f"{load.kv_blocks_offloaded} went there, {load.kv_blocks_loaded} came back"
    return [("KV blocks on the host", f"{load.kv_host_blocks_used} of {load.kv_host_blocks_total}, {copied}")]


def _exchanged(load: LlmServiceGetLoadResponse) -> list[tuple[str, str]]:
    prompts = f"{load.prefills_elsewhere}, of which {load.prefills_failed} failed there"
    blocks = f"{load.kv_blocks_received} came, {load.kv_blocks_lent} went"
    return [("prompts computed elsewhere", prompts), ("KV blocks between services", blocks)]


def _states(load: LlmServiceGetLoadResponse) -> list[tuple[str, str]]:
    return [("state slots in use", f"{load.state_slots_used} of {load.state_slots}, {load.state_snapshots} snapshots")]


def _drafts(load: LlmServiceGetLoadResponse) -> list[tuple[str, str]]:
    accepted = share(load.accepted_draft_tokens, load.draft_tokens)
    return [("drafts verified", f"{load.draft_tokens} tokens, {accepted} of them right")]


def _weights(weights: Weights) -> str:
    bytes_ = f"{size(weights.bytes)} on the first rank"
    if not weights.bits:
        return bytes_
    how = f"longer in {weights.widened_in}" if weights.widened_in else f"multiplied with {weights.inputs}"
    return f"{bytes_}; {weights.quantization}, {weights.number} of {weights.bits} bits, {how}"


def _received(load: LlmServiceGetLoadResponse) -> str:
    mirrored = f", {load.rows_mirrored} from GPU to GPU" if load.rows_mirrored else ""
    by_nixl = f", {load.rows_nixl} by NIXL" if load.rows_nixl else ""
    return f"{load.rows_received}, of them {load.rows_shared} from shared memory{mirrored}{by_nixl}"


def _state(known: EncoderStatus) -> str:
    state = "usable" if known.usable else "not usable"
    state += ", shared memory" if known.shared_memory else ", NIXL" if known.nixl else ""
    state += f", {known.in_flight} in flight"
    return state + (f", {known.failures} streams broke in a row" if known.failures else "")


def encoder(address: str, info: EncoderServiceGetInfoResponse, load: EncoderServiceGetLoadResponse) -> str:
    """An encoder: its queues, its store, and its transfers."""
    asked = load.store_hits + load.store_misses
    rows = [
        ("release", f"{info.version}, digest {info.digest[:_DIGITS]}"),
        ("rows", f"{info.levels} levels of {info.width} {_name(DataType, info.dtype)}"),
        ("rows leave", ", ".join(_name(Transport, number) for number in info.transports)),
        ("items queued / running", f"{load.queued_items} / {load.running_items}"),
        ("patches queued / running", f"{load.queued_patches} / {load.running_patches}{_until_done(load)}"),
        ("encoded / failed", f"{load.encoded_items} / {load.failed_items}"),
        ("open streams / leases", f"{load.open_streams} / {load.leases}"),
        ("ViT passes / patches", f"{load.vit_calls} / {load.vit_patches}"),
        ("store hits / misses", f"{load.store_hits} / {load.store_misses} ({share(load.store_hits, asked)})"),
        (
            "store",
            f"{load.store_entries} entries, {size(load.store_bytes)} of {size(load.store_capacity_bytes)}",
        ),
        *(
            (f"rows sent: {_name(Transport, sent.transport)}", f"{sent.rows}, {size(sent.bytes)}")
            for sent in load.rows_sent
        ),
    ]
    if load.device_pool_capacity_bytes:
        pool = f"{size(load.device_pool_bytes)} of {size(load.device_pool_capacity_bytes)}"
        rows.append(("rows kept on GPUs", pool))
    if load.HasField("shared"):
        rows.append(("shared store", _shared(load.shared)))
    title = f"encoder {address}: {info.model} ({info.architecture}) on {', '.join(info.devices)}"
    return _section(title, rows, load.stage_totals)


def _until_done(load: EncoderServiceGetLoadResponse) -> str:
    known = load.HasField("estimated_milliseconds") and load.estimated_milliseconds
    return f", done in about {milliseconds(load.estimated_milliseconds / 1000)}" if known else ""


def _name(kind: Any, number: int) -> str:
    """A number of an enumeration in words; one of a newer service stays a number.

    >>> _name(Transport, 2), _name(DataType, 99)
    ('shared memory', '99')
    """
    if number not in kind.values():
        return str(number)
    prefix = {Transport: "TRANSPORT_", DataType: "DATA_TYPE_"}[kind]
    return str(kind.Name(number)).removeprefix(prefix).lower().replace("_", " ")


def _shared(load: SharedStoreLoad) -> str:
    return (
        f"{load.hits} hits, {load.written} written, {load.dropped} not written, {load.errors} errors, "
        f"{load.garbage} damaged, {load.waits_in_vain} waits in vain"
    )


def _section(title: str, rows: Iterable[tuple[str, str]], stages: Iterable[StageTiming]) -> str:
    lines = [title, *(f"  {name:<30} {value}" for name, value in rows)]
    times = [(timing.stage, milliseconds(timing.seconds)) for timing in stages]
    if times:
        shown = table([("stage", "total"), *times])
        lines += ["", *(f"  {line}" for line in shown.splitlines())]
    return "\n".join(lines)
