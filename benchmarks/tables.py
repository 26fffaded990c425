"""`python -m benchmarks.tables FOLDER`: all tables of docs/PERFORMANCE.md that need no GPU, one after the other.

For an idle machine with two cores, in about 25 minutes. Each table is a command with a time limit. Its output goes to
a file in the folder, below a head with processor, versions, commit, command and previous load. A table with a file is
not measured again, so an interrupted run resumes. One that failed leaves its output in a file that ends in `.failed`,
and is tried again. Each benchmark says what is new and what is *repeated* (`python -m benchmarks.NAME --help`), and
shows cache hits.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.checkpoint import CACHE
from llm_service.layers.cpu.selection import wide_vectors

_QUIET = 0.1
"""The share of the cores above which others are at work."""
_UNWIND_SECONDS = 60.0
_KILLED_SECONDS = 5.0
_CHOSEN = ("OMP_", "GOMP_", "KMP_", "MKL_", "NUMBA_", "TWINLENS_")
"""Beginnings of variables that would change figures; a table sets those that it wants."""
_CHECKPOINTS = (("qwen3_vl", "float32"), ("qwen3_vl", "bfloat16"), ("qwen3_5", "bfloat16"))
"""Architecture and weights of the random checkpoints that tables take."""
_SPIN_LITTLE = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "20000"}  # as the services' workers have it


popen: Callable[..., Any] = subprocess.Popen
"""What starts a table. Those who take many small ones in a row have something faster."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table: its file's name, what is run, with which variables, for how many seconds at most, and why it cannot be
    taken here, if so."""

    name: str
    command: Sequence[str]
    seconds: float
    environ: Mapping[str, str] = field(default_factory=dict)
    hindrance: str = ""

    def __str__(self) -> str:
        """As one types it."""
        variables = [f"{name}={value}" for name, value in self.environ.items()]
        return " ".join([*variables, "python", *map(shlex.quote, self.command)])


def all_tables(vllm: Path | None) -> list[Table]:
    """In the order of the page."""
    published = ("--weights", "bfloat16")
    hybrid = (*published, "--architecture", "qwen3_5")
    peer = ("--vllm", str(vllm)) if vllm else ()
    wide = "" if wide_vectors() else "this processor lacks AVX-512, which our kernel needs"
    return [
        _of("peers", "", *published, "--runs", "6", "--tokens", "32", *peer, seconds=1200),
        _of("in_turns", "in_turns", *published, "--pictures", "8", "--tokens", "16", seconds=240),
        _of("company", "company", "--rounds", "2", seconds=400),
        _of("company_published", "company", *published, "--rounds", "2", seconds=400),
        _of("hybrid", "in_turns", *hybrid, "--pictures", "8", "--tokens", "16", seconds=400),
        _of(
            "encoder", "encoder", "--runs", "5", "--count", "16", "--threads", "2", "--sizes", "224", "448", seconds=300
        ),
        _of("tower", "tower", "--runs", "3", seconds=240),
        _of("transports", "transports", "--runs", "40", seconds=180),
        _of("transports_afar", "transports", "--runs", "10", "--round-trip-ms", "10", seconds=180),
        _of("failures", "failures", "--rounds", "3", seconds=300),
        _of("early_prefill", "early_prefill", "--runs", "2", seconds=420),
        _of("pruning", "pruning", *published, "--runs", "3", seconds=240),
        _of("decode", "decode", *published, "--steps", "5", seconds=420),
        _of("linear", "linear", seconds=240, environ=_SPIN_LITTLE),
        _of("attention", "attention", seconds=120, environ=_SPIN_LITTLE, hindrance=wide),
        _of("sampler", "sampler", "--steps", "3", seconds=180),
        _of("scheduler", "scheduler", seconds=60),
        _of("overlap", "overlap", "models/demo", "--runs", "3", seconds=180, environ={"TWINLENS_LLM_THREADS": "1"}),
        _of("gateway", "gateway", seconds=240),
        _of("gateway_light", "gateway", "--engine", "light", seconds=180),
        _of("gateway_paced", "gateway", "--engine", "paced", seconds=240),
        _of("handovers", "handovers", seconds=240),
    ]


def tiny_tables(vllm: Path | None) -> list[Table]:
    """The same benchmarks on small models and with few repetitions: whether they run. Their figures mean nothing."""
    demo = ("--model", "models/demo")
    peer = ("--vllm", str(vllm)) if vllm else ()
    tiny = {
        "peers": (*demo, "--runs", "1", "--tokens", "4", *peer),
        "in_turns": (*demo, "--pictures", "1", "--tokens", "4"),
        "company": (*demo, "--pictures", "1", "--at-once", "2", "--tokens", "4", "--lone-tokens", "6"),
        "company_published": (*demo, "--pictures", "1", "--at-once", "2", "--tokens", "4", "--lone-tokens", "6"),
        "hybrid": (*demo, "--pictures", "1", "--tokens", "4"),
        "encoder": (*demo, "--runs", "1", "--count", "2", "--many", "2", "--sizes", "224"),
        "tower": (*demo, "--runs", "1", "--sides", "224"),
        "transports": ("--runs", "1"),
        "transports_afar": ("--runs", "1", "--round-trip-ms", "2"),
        "failures": ("--rounds", "1", "--callers", "2", "--away", "0.5"),
        "early_prefill": (*demo, "--runs", "1"),
        "pruning": (*demo, "--runs", "1"),
        "decode": (*demo, "--steps", "1", "--context", "32"),
        "linear": ("--rows", "1", "--passes", "1", "--megabytes", "26"),
        "attention": ("--rounds", "1"),
        "sampler": ("--steps", "1", "--rows", "2"),
        "overlap": ("models/demo", "--runs", "1", "--tokens", "4"),
        "gateway": ("--streams", "1", "--rounds", "1", "--tokens", "4"),
        "gateway_paced": ("--engine", "paced", "--streams", "1", "--rounds", "1", "--tokens", "4"),
        "handovers": ("--streams", "4", "--rounds", "1", "--tokens", "30"),
        "gateway_light": ("--engine", "light", "--streams", "1", "--rounds", "1", "--tokens", "4"),
    }
    return [
        Table(each.name, (*each.command[:2], *tiny.get(each.name, ())), each.seconds, each.environ, each.hindrance)
        for each in all_tables(vllm)
    ]


def _of(
    name: str,
    module: str,
    *arguments: str,
    seconds: float,
    environ: Mapping[str, str] | None = None,
    hindrance: str = "",
) -> Table:
    whole = f"benchmarks.{module}" if module else "benchmarks"
    return Table(name, ("-m", whole, *arguments), seconds, environ or {}, hindrance)


def take(table: Table, folder: Path, head: Sequence[str]) -> str:
    """Takes one, unless it is there; says how that went."""
    wanted, failed = folder / f"{table.name}.md", folder / f"{table.name}.failed"
    if wanted.is_file():
        return "is there"
    if table.hindrance:
        return f"left out: {table.hindrance}"
    failed.unlink(missing_ok=True)
    part = folder / f"{table.name}.part"
    others, begun = machine.busy(), time.monotonic()
    with part.open("w", encoding="utf-8") as out:
        code = _run(table, out.fileno())
    took = time.monotonic() - begun
    quiet = "quiet" if others < _QUIET else "NOT QUIET"
    lines = [*head, f"others before: {others:.0%} of the cores, {quiet}", f"took: {took:.0f} s", f"command: {table}"]
    text = "\n".join([f"# {table.name}", "", *(f"- {line}" for line in lines), "", part.read_text(encoding="utf-8")])
    part.write_text(text, encoding="utf-8")
    part.rename(wanted if code == 0 else failed)
    how = "" if code == 0 else ", FAILED: out of time" if code is None else f", FAILED: exit code {code}"
    return f"{took:.0f} s, {quiet}{how}"


def _run(table: Table, out: int) -> int | None:
    """The exit code; None where the time ran out. It is interrupted then, so that it stops what it has started."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_CHOSEN)}
    command = [sys.executable, *table.command]
    # A shell's background job ignores SIGINT, and so would all that it starts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    child = popen(
        command,
        stdout=out,
        stderr=out,
        env={**environ, **table.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    signal.signal(signal.SIGINT, before)
    try:
        return child.wait(table.seconds) or 0
    except subprocess.TimeoutExpired:
        return None
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_UNWIND_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # what may be left of its processes
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver that hangs keeps a process that was killed
            child.wait(_KILLED_SECONDS)


def _prepare() -> None:
    """Makes the checkpoints that tables need, in a process of its own, so that no table's time is spent on it."""
    program = "import argparse, sys; from benchmarks.checkpoint import chosen_model\n"
    program += "chosen_model(argparse.Namespace(model=None, architecture=sys.argv[1], weights=sys.argv[2]))"
    print(f"checkpoints in {CACHE.parent}", flush=True)
    for kind in _CHECKPOINTS:
        subprocess.run([sys.executable, "-c", program, *kind], check=True)


def main() -> None:
    """Takes all that are missing; the exit code is 1 where one failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of the tables; created if missing")
    parser.add_argument("--vllm", type=Path, help="vLLM's program, for the table with peers")
    parser.add_argument("--tables", nargs="+", metavar="NAME", help="only these")
    parser.add_argument(
        "--tiny", action="store_true", help="a test run: small models, few repetitions, no figures; in FOLDER/tiny"
    )
    given = parser.parse_args()
    wanted = tiny_tables(given.vllm) if given.tiny else all_tables(given.vllm)
    if unknown := set(given.tables or ()) - {table.name for table in wanted}:
        parser.error(f"there is no table {', '.join(sorted(unknown))}; there are {', '.join(t.name for t in wanted)}")
    wanted = [table for table in wanted if given.tables is None or table.name in given.tables]
    folder: Path = given.folder / "tiny" if given.tiny else given.folder
    folder.mkdir(parents=True, exist_ok=True)
    if not given.tiny:
        _prepare()
    today = dt.datetime.now(dt.UTC).date().isoformat()
    head = [f"processor: {machine.processor()}", f"software: {machine.software()}", f"commit: {machine.source()}"]
    head += [f"date: {today}", *(["TINY SETTINGS: these figures mean nothing"] if given.tiny else [])]
    print("\n".join(head), flush=True)
    for number, table in enumerate(wanted, 1):
        print(f"[{number}/{len(wanted)}] {table.name}: ", end="", flush=True)
        print(take(table, folder, head), flush=True)
    failed = [table.name for table in wanted if (folder / f"{table.name}.failed").exists()]
    sys.exit(f"failed: {', '.join(failed)}" if failed else None)


if __name__ == "__main__":
    main()
