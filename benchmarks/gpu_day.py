"""`python -m benchmarks.gpu_day PART FOLDER`: a part of what is to be found out when a GPU is there for half an hour.

1: versions, imports and ceilings, then all tests for GPUs, in several processes, those of what Qwen3-VL goes through
first: what is wrong counts before what is slow. 2: both services with the shape of Qwen3-VL-8B and random weights,
against transformers in the same run; decoder and engine. 3: attention, tower, long contexts, where time goes, short
weights, and kernels under compute-sanitizer.
Each part takes less than nine minutes, each section of it has a limit of its own, and begins whatever became of those
before it. A section's output goes to a file in the folder, rows of benchmarks go to
rows.jsonl as well, one by one, so that what was reached is kept; a section whose file is there is not run again, and
one that failed leaves its words in a file that ends in `.failed`, the last of which are shown. What is new and what is
*repeated*, and what caches gave, each benchmark says. `tools/gpu_day.sh` sets up the environment for this.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import machine
from benchmarks.quantized import FORMS
from benchmarks.tables import Table, take
from common.devices import usable_cores

_PART_SECONDS = 500.0
"""A section that is ended has a minute to unwind, and a part ten minutes with all that it takes to begin."""
_PATIENCE = 4
"""Times as long as on a GPU may all take where it is tiny: a CPU compiles kernels of its own, interprets those of GPUs,
and may have other things to do."""
_LEAST_SECONDS = 10.0
"""With less left, a section is not begun."""
_SHOWN = 25
"""Lines of what failed."""
_NATIVE_TESTS = (
    "test_parity_on_gpu",
    "test_llm_on_gpu",
    "test_vision_attention_on_gpu",
    "test_rows_on_gpu",
    "test_graphs_on_gpu",
    "test_encoder_on_gpu",
    "test_pixels_on_gpu",
    "test_shapes_on_gpu",
)
"""Of what Qwen3-VL goes through."""
_TESTS = (
    "test_adapters_on_gpu",
    "test_quantized_on_gpu",
    "test_gdn_on_gpu",
    "test_library_graphs_on_gpu",
    "test_cuda_ipc_on_gpu",
    "test_ranks_on_gpus",
    "test_kda_on_gpu",
    "test_mamba2_on_gpu",
    "test_short_convolution_on_gpu",
    "test_host_blocks_on_gpu",
)
_SANITIZED = (
    "test_rows_on_gpu::test_a_gate_is_torch_s",
    "test_vision_attention_on_gpu::test_what_is_not_finite_stays_in_its_segment",
    "test_pixels_on_gpu::test_tiles_have_the_same_bits",
    "test_llm_on_gpu::test_long_contexts_are_split_and_put_together",
)


def parts(folder: Path, *, tiny: bool) -> dict[int, list[Table]]:
    """The sections of each part, in order."""
    sanitizer = shutil.which("compute-sanitizer")
    model, experts = folder / "model", ("--experts", "--layers", "24")
    little = ("--runs", "1", "--tokens", "4") if tiny else ("--runs", "3", "--tokens", "64")
    sanitized = _tests("sanitizer", 120, *_SANITIZED, tiny=tiny, alone=True)
    if sanitizer:
        program = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"
        watched = (sanitizer, "--error-exitcode", "9", sys.executable, *sanitized.command)
        sanitized = replace(sanitized, command=("-c", program, *watched))

    def bench(name: str, module: str, seconds: float, *arguments: str) -> Table:
        settings = ("--json", str(folder / "rows.jsonl"), *(("--tiny",) if tiny else ()))
        return Table(name, ("-m", f"benchmarks.{module}", *arguments, *settings), seconds, _environ(tiny=tiny))

    made = {
        1: [
            bench("ceilings", "device", 60),
            _tests("test_native", 230, *_NATIVE_TESTS, tiny=tiny),
            _tests("test_others", 210, *_TESTS, tiny=tiny),
        ],
        2: [
            Table("checkpoint", ("-m", "benchmarks.real_shape", str(model), *(("--tiny",) if tiny else ())), 150),
            Table("services", ("-m", "benchmarks", "--model", str(model), *little), 330),
            bench("decoder", "llm_device", 100),
            bench("engine", "engine_device", 80),
        ],
        3: [
            bench("attention", "attention_device", 90),
            bench("tower", "vit", 80),
            bench("pixels", "pixels_device", 40),
            bench("decoder_long", "llm_device", 80, "--layers", "12", "--context", "8192", "32768", "--tokens", "8192"),
            bench("profile", "profile_device", 60),
            *(bench(f"decoder_{form}", "llm_device", 45, "--weights", form, "--tokens", "512") for form in FORMS),
            bench("decoder_experts", "llm_device", 60, *experts, "--tokens", "512", "2048"),
            *(
                bench(f"experts_{form}", "llm_device", 45, *experts, "--tokens", "512", "--weights", form)
                for form in ("fp8", "w8a8")
            ),
            sanitized if sanitizer or tiny else replace(sanitized, hindrance="there is no compute-sanitizer"),
        ],
    }
    patience = _PATIENCE if tiny else 1
    return {
        part: [replace(each, seconds=patience * each.seconds) for each in sections] for part, sections in made.items()
    }


def _tests(name: str, seconds: float, *files: str, tiny: bool, alone: bool = False) -> Table:
    """Tests of GPUs by name of file, or of a test in one, which several processes share unless they run `alone`; where
    all is tiny they are collected, and no more. Warnings are errors with the pinned versions alone. A kernel that
    breaks a process's context, or hangs, takes that process along, and no other test (`tests/gpu/conftest.py`)."""
    paths = [f"tests/gpu/{file}.py{colons}{test}" for file, colons, test in (each.partition("::") for each in files)]
    limit = ("--timeout", "120", "--timeout-method", "thread")  # a signal does not end the wait for a kernel that hangs
    command = ("-m", "pytest", "-q", "--tb", "short", "-m", "gpu", "-W", "default", *limit, *paths)
    shared = () if alone else ("-n", str(max(1, usable_cores() - 4)))
    return Table(name, (*command, *(("--collect-only",) if tiny else shared)), seconds)


def _environ(*, tiny: bool) -> dict[str, str]:
    return {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} if tiny else {}


def pack(folder: Path, archive: Path) -> None:
    """Puts all that was said so far into one file, which is there as a whole or as it was."""
    said = [path for path in sorted(folder.iterdir()) if path.suffix in (".md", ".failed", ".part", ".jsonl")]
    half = archive.with_suffix(".half")
    with tarfile.open(half, "w:gz") as made:
        for path in said:
            made.add(path, path.name)
    half.rename(archive)


def run(
    sections: Sequence[Table], folder: Path, head: Sequence[str], seconds: float, archive: Path | None = None
) -> list[str]:
    """Runs all that are missing, each within its own limit and what is left of `seconds`; names of those that failed,
    or for which no time was left. After each one the `archive` has what was said."""
    end, failed = time.monotonic() + seconds, []
    for section in sections:
        left = end - time.monotonic()
        print(f"{section.name}: ", end="", flush=True)
        if left < _LEAST_SECONDS and not (folder / f"{section.name}.md").exists():
            said = "no time is left"
        else:
            said = take(replace(section, seconds=min(section.seconds, left)), folder, head)
        print(said, flush=True)
        if archive is not None:
            pack(folder, archive)
        if "FAILED" in said or said == "no time is left":
            failed.append(section.name)
        if "FAILED" in said:
            words = (folder / f"{section.name}.failed").read_text(encoding="utf-8").splitlines()
            print("\n".join(f"    {line[:200]}" for line in words[-_SHOWN:]), flush=True)
    return failed


def main() -> None:
    """Runs a part; the exit code is 1 where anything of it failed, or is still to be run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_day", description=__doc__)
    parser.add_argument("part", type=int, choices=(1, 2, 3))
    parser.add_argument("folder", type=Path, help="where results go; made if it is not there")
    parser.add_argument("--seconds", type=float, help="for the part")
    parser.add_argument(
        "--tiny", action="store_true", help="whether all runs: small shapes, no figures; on CPUs as well"
    )
    given = parser.parse_args()
    folder: Path = given.folder / "tiny" if given.tiny else given.folder
    folder.mkdir(parents=True, exist_ok=True)
    head = [f"processor: {machine.processor()}", f"software: {machine.software()}", f"commit: {machine.source()}"]
    head += ["TINY SETTINGS: these figures mean nothing"] if given.tiny else []
    print("\n".join(head), flush=True)
    archive = Path(out) / f"gpu_day_{given.part}.tar.gz" if (out := os.environ.get("OUT")) else None
    seconds = given.seconds or _PART_SECONDS * (_PATIENCE if given.tiny else 1)
    failed = run(parts(folder, tiny=given.tiny)[given.part], folder, head, seconds, archive)
    sys.exit(f"failed: {', '.join(failed)}" if failed else None)


if __name__ == "__main__":
    main()
