"""`python -m benchmarks.gpu_day PARTS --folder FOLDER`: what to measure when a GPU is available for half an hour.

- 1: whether a small model answers as transformers does, eagerly and from graphs; whether each kernel is correct and
  can be captured; ceilings; then decoder, engine and tower.
- 2: both services with Qwen3-VL-8B's shape and random weights, against transformers in the same run; a profile, and
  attention.
- 3: all tests for GPUs, in several processes.
- 4, in the remaining time: long contexts, short weights, experts, pixels, and kernels under compute-sanitizer.

A call takes less than ten minutes, with all that it takes to begin. Each section has its own time limit, starts
whatever the earlier ones gave, and starts only if there is time for it; further calls continue. A section's output goes
to a file in the folder, rows of benchmarks also go to rows.jsonl, one by one, so that partial results are kept. A
section with a file is not run again. One that failed leaves its output in a file that ends in `.failed`, whose last
lines are shown, and is run again after those not yet tried. Each benchmark says what is new and what is *repeated*, and
shows cache hits. `tools/gpu_day.sh` sets up the environment.
"""

from __future__ import annotations

import argparse
import os
import platform
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

_PART_SECONDS = 500.0
"""From the script's beginning on, which may take long where nothing was read from a disk yet. A section that is ended
has a minute to unwind, and all together ten minutes."""
_PATIENCE = 4
"""Times as long as on a GPU may all take where it is tiny: a CPU compiles kernels of its own, interprets those of GPUs,
and may have other things to do."""
_LEAST_SECONDS = 10.0
"""With less left, a section is not begun."""
_SHOWN = 25
"""Lines of what failed."""
_PROCESSES = 8
"""That share tests: each has a context of its own on the GPU, and compiles what no other one does."""
TEST_OPTIONS = ("-n", str(_PROCESSES), "--dist", "loadfile", "--timeout", "120", "--timeout-method", "thread")
"""Of pytest. A file's tests stay in one process, since Triton's cache has no lock: one kernel would be compiled many
times at once. A signal does not end the wait for a kernel that hangs, a thread does."""
BY_TORCH = {f"TWINLENS_{service}_KERNELS": "torch" for service in ("LLM", "ENCODER")}
"""What a CPU computes beside a GPU torch does, whose kernels are there."""
_SPREAD = ("--dist", "worksteal")
"""Those that start services take longer to start them than to compile: a file's are spread over the processes."""
_HANG, _FIRST_HANG = ("--timeout", "50"), ("--timeout", "80")
"""Of tests that start no service: one that hangs takes less than a minute, or a little more of the first, which find
nothing compiled. What is said last counts."""
FIRST = (
    "tests/gpu/test_parity_on_gpu.py::test_greedy_tokens_are_the_references[qwen3_vl]",
    "tests/gpu/test_llm_on_gpu.py::test_graphs_give_the_tokens_of_eager_steps[qwen3_vl-64]",
)
"""Whether anything runs at all."""
_NATIVE_TESTS = (
    "test_captures_on_gpu",
    "test_parity_on_gpu",
    "test_llm_on_gpu",
    "test_vision_attention_on_gpu",
    "test_rows_on_gpu",
    "test_pixels_on_gpu",
    "test_shapes_on_gpu",
)
"""Of what Qwen3-VL goes through."""
_SERVICE_TESTS = (
    "test_graphs_on_gpu",
    "test_encoder_on_gpu",
    "test_cuda_ipc_on_gpu",
    "test_hf_graphs_on_gpu",
    "test_ranks_on_gpus",
)
"""Those that start services, each of which has to load torch."""
_TESTS = (
    "test_adapters_on_gpu",
    "test_quantized_on_gpu",
    "test_gdn_on_gpu",
    "test_kda_on_gpu",
    "test_mamba2_on_gpu",
    "test_short_convolution_on_gpu",
    "test_host_blocks_on_gpu",
)
_TOOLKIT = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
"""Where CUDA's tools are, though a path may not lead there."""
_SHORT = ("w8a8", "fp8")
"""Forms of weights that are timed; the others are tried with the kernels."""
assert set(_SHORT) <= FORMS.keys()


def parts(folder: Path, *, tiny: bool) -> dict[int, list[Table]]:
    """The sections of each part, in order."""
    model, experts = folder / "model", ("--experts", "--layers", "24")
    little = ("--runs", "1", "--tokens", "4") if tiny else ("--runs", "3", "--tokens", "64")
    small = ("--tiny",) if tiny else ()

    def bench(name: str, module: str, seconds: float, *arguments: str) -> Table:
        settings = ("--json", str(folder / "rows.jsonl"), *small)
        return Table(name, ("-m", f"benchmarks.{module}", *arguments, *settings), seconds, _environ(tiny=tiny))

    made = {
        1: [
            _tests("first", 130, *FIRST, alone=True, tiny=tiny),
            Table("kernels", ("-m", "benchmarks.kernels_device", *small), 220, _environ(tiny=tiny)),
            bench("ceilings", "device", 40),
            bench("decoder", "llm_device", 110),
            bench("engine", "engine_device", 80),
            bench("tower", "vit", 60),
        ],
        2: [
            Table("checkpoint", ("-m", "benchmarks.real_shape", str(model), *small), 120),
            Table("services", ("-m", "benchmarks", "--model", str(model), *little), 270),
            bench("profile", "profile_device", 60),
            bench("attention", "attention_device", 80),
        ],
        3: [
            _tests("test_native", 110, *_paths(_NATIVE_TESTS), tiny=tiny),
            _tests("test_services", 240, *_paths(_SERVICE_TESTS), services=True, tiny=tiny),
            _tests("test_others", 80, *_paths(_TESTS), tiny=tiny),
        ],
        4: [
            bench("decoder_long", "llm_device", 80, "--layers", "12", "--context", "8192", "32768", "--tokens", "8192"),
            *(bench(f"decoder_{form}", "llm_device", 60, "--weights", form, "--tokens", "512") for form in _SHORT),
            bench("decoder_experts", "llm_device", 70, *experts, "--tokens", "512", "2048"),
            bench("experts_fp8", "llm_device", 60, *experts, "--tokens", "512", "--weights", "fp8"),
            bench("pixels", "pixels_device", 40),
            _sanitized(tiny=tiny),
        ],
    }
    patience = _PATIENCE if tiny else 1
    return {
        part: [replace(each, seconds=patience * each.seconds) for each in sections] for part, sections in made.items()
    }


def _sanitized(*, tiny: bool) -> Table:
    """A launch of each kernel over few numbers, with memory that torch keeps no pool of: within a pool nothing is out
    of bounds. Calls that a driver refuses, as libraries make some, are no errors of a kernel."""
    sanitizer = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *_TOOLKIT]))
    program = (sys.executable, "-m", "benchmarks.kernels_device", "--once", "--tiny")
    whole = (sanitizer, "--error-exitcode", "9", "--report-api-errors", "no", *program) if sanitizer else program
    command = ("-c", "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))", *whole)
    environ = {**_environ(tiny=tiny), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    hindrance = "" if sanitizer or tiny else "there is no compute-sanitizer"
    return Table("sanitizer", command, 150, environ, hindrance)


def _paths(files: Sequence[str]) -> list[str]:
    return [f"tests/gpu/{file}.py" for file in files]


def _tests(name: str, seconds: float, *paths: str, tiny: bool, services: bool = False, alone: bool = False) -> Table:
    """Tests of GPUs, `alone` those in this process; where all is tiny they are collected, and no more. Warnings are
    errors with the pinned versions alone. A kernel that breaks a process's context, or hangs, takes that process along,
    and no other test; what failed is told at once (`tests/gpu/conftest.py`)."""
    options = TEST_OPTIONS[TEST_OPTIONS.index("--timeout") :] if alone else TEST_OPTIONS
    more = _SPREAD if services else _FIRST_HANG if alone else _HANG
    options = ("--collect-only",) if tiny else (*options, *more)
    return Table(
        name, ("-m", "pytest", "-q", "--tb", "short", "-m", "gpu", "-W", "default", *paths, *options), seconds, BY_TORCH
    )


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


def untried_first(sections: Sequence[Table], folder: Path) -> list[Table]:
    """In their order, but for those that have failed before: what fails each time would take the time of all others."""
    return sorted(sections, key=lambda section: (folder / f"{section.name}.failed").exists())


def run(
    sections: Sequence[Table], folder: Path, head: Sequence[str], seconds: float, archive: Path | None = None
) -> list[str]:
    """Runs all that are missing, each within its own limit, as long as that is left of `seconds`, or for the first one
    as long as anything is; names of those that failed, or for which no time was left. After each one the `archive` has
    what was said."""
    end, failed, begun = time.monotonic() + seconds, [], False
    for section in sections:
        left = end - time.monotonic()
        print(f"{section.name}: ", end="", flush=True)
        there = (folder / f"{section.name}.md").exists() or bool(section.hindrance)
        if not there and (left < _LEAST_SECONDS or (begun and left < section.seconds)):
            said = "no time is left"
        else:
            begun |= not there
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
    """Runs parts; the exit code is 1 where anything of them failed, or is still to be run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_day", description=__doc__)
    parser.add_argument("parts", type=int, nargs="+", choices=(1, 2, 3, 4))
    parser.add_argument("--folder", type=Path, required=True, help="folder of results; created if missing")
    parser.add_argument("--seconds", type=float, help="seconds for all parts together")
    parser.add_argument("--begun", type=float, default=time.time(), help="when these began, in seconds since 1970")
    parser.add_argument("--tiny", action="store_true", help="a test run: small shapes, no figures; on CPUs as well")
    given = parser.parse_args()
    folder: Path = given.folder / "tiny" if given.tiny else given.folder
    folder.mkdir(parents=True, exist_ok=True)
    head = [f"processor: {machine.processor()}", f"software: {machine.software()}", f"commit: {machine.source()}"]
    head.append(f"system: {platform.system()} {platform.release()}")
    head += ["TINY SETTINGS: these figures mean nothing"] if given.tiny else []
    print("\n".join(head), flush=True)
    archive = Path(out) / "gpu_day.tar.gz" if (out := os.environ.get("OUT")) else None
    seconds = given.seconds or _PART_SECONDS * (_PATIENCE if given.tiny else 1)
    every = parts(folder, tiny=given.tiny)
    sections = untried_first([section for part in given.parts for section in every[part]], folder)
    failed = run(sections, folder, head, seconds - (time.time() - given.begun), archive)
    sys.exit(f"failed: {', '.join(failed)}" if failed else None)


if __name__ == "__main__":
    main()
