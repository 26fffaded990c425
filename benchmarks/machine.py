"""The machine of a measurement and its load, for the head of a table."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from common.hardware import usable_cores

_PACKAGES = ("torch", "transformers", "numpy", "numba", "grpcio", "protobuf")
_VECTORS = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "bfloat16", "amx_tile": "AMX"}


def processor() -> str:
    """Its name, family and model, since clouds call many alike, cores, memory, and what its vectors can.

    For example "AMD EPYC (family 25, model 1), 2 cores, 23 GiB, AVX2".
    """
    about = _fields(Path("/proc/cpuinfo").read_text())
    memory = int(_fields(Path("/proc/meminfo").read_text())["MemTotal"].split()[0]) / 2**20
    flags = about.get("flags", "").split()
    vectors = ", ".join(said for flag, said in _VECTORS.items() if flag in flags)
    kind = f"family {about.get('cpu family')}, model {about.get('model')}"
    name = about.get("model name", platform.machine())
    return f"{name} ({kind}), {usable_cores()} cores, {memory:.0f} GiB, {vectors or 'no vectors that are known here'}"


def software() -> str:
    """Python and the packages that figures depend on."""
    return ", ".join(
        [f"Python {platform.python_version()}", *(f"{name} {metadata.version(name)}" for name in _PACKAGES)]
    )


def source() -> str:
    """The commit of the sources, and whether they were changed since; empty where there is no git."""
    try:
        commit = _said("git", "rev-parse", "--short", "HEAD")
        return f"{commit}, with changes" if _said("git", "status", "--porcelain") else commit
    except (OSError, subprocess.CalledProcessError):
        return ""


def busy(seconds: float = 2.0) -> float:
    """The share of all cores that computes at this moment, while this process waits."""
    before = _processor_times()
    time.sleep(seconds)
    spent = [now - then for now, then in zip(_processor_times(), before, strict=True)]
    idle = sum(spent[3:5])  # idle, and waiting for a disk: proc_stat(5)
    return 1.0 - idle / max(1, sum(spent))


def _processor_times() -> Sequence[int]:
    return [int(each) for each in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]


def _fields(text: str) -> dict[str, str]:
    """Lines of `name: value`; of several with one name the first."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())
    return found


def _said(*command: str) -> str:
    here = Path(__file__).parent
    return subprocess.run(command, cwd=here, check=True, capture_output=True, text=True, env=os.environ).stdout.strip()
