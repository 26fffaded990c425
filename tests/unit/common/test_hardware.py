"""What hardware is here, and what a process may use of it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common import hardware
from common.checkpoints.checkpoint import Checkpoint
from common.hardware import (
    check_device,
    computed_in,
    cuda_capability,
    cuda_device_count,
    cuda_memory,
    default_device,
    default_dtype,
    memory_limit,
    usable_cores,
)


@pytest.mark.parametrize(
    ("said", "cores"),
    [("max 100000", 8), ("400000 100000", 4), ("250000 100000", 2), ("50000 100000", 1), ("9900000 100000", 8)],
)
def test_a_container_s_share_of_the_cores_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    (tmp_path / "cpu.max").write_text(f"{said}\n")
    assert usable_cores(tmp_path) == cores


def test_without_a_control_group_all_cores_that_it_may_run_on_are_usable(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == len(os.sched_getaffinity(0))


def test_the_suite_for_cpus_sees_no_gpu_whatever_the_machine_has() -> None:
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert cuda_device_count() == 0
    assert cuda_memory(0) == 0
    assert cuda_capability(0) == (0, 0)
    assert default_device() == "cpu"


def test_a_gpu_s_capability_is_the_driver_s(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        """Of two GPUs, 8.9 and 10.0."""

        def cuInit(self, _: int) -> int:
            return 0

        def cuDeviceGetCount(self, count: Any) -> int:
            count._obj.value = 2
            return 0

        def cuDeviceGet(self, device: Any, index: int) -> int:
            device._obj.value = index
            return 0

        def cuDeviceGetAttribute(self, found: Any, attribute: int, device: Any) -> int:
            found._obj.value = {75: (8, 10), 76: (9, 0)}[attribute][device.value]
            return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver())
    assert [cuda_capability(index) for index in range(3)] == [(8, 9), (10, 0), (0, 0)]


@pytest.mark.parametrize(
    ("device", "wanted", "there"), [("cpu", 8, 0), ("cuda", 1, 1), ("cuda:0", 2, 2), ("cuda:1", 1, 2), ("cuda", 4, 4)]
)
def test_a_device_that_is_there_is_none_to_complain_of(device: str, wanted: int, there: int) -> None:
    check_device(device, wanted, there)


@pytest.mark.parametrize(
    ("device", "wanted", "there", "says"),
    [
        ("cuda:0", 1, None, "--device cuda:0: no GPU can be seen here; --device cpu needs none"),
        ("cuda:2", 1, 2, "cuda:2 is needed, and the last GPU that can be seen here is cuda:1"),
        ("cuda:0", 4, 1, "cuda:3 is needed"),
        ("gpu", 1, 1, "--device gpu is not cpu, cuda or cuda:N"),
        ("cuda:", 1, 1, "is not cpu, cuda or"),
        ("cuda:-1", 1, 1, "is not cpu, cuda or"),
        ("cpu:0", 1, 1, "is not cpu, cuda or"),
    ],
)
def test_a_device_that_is_not_there_is_named(device: str, wanted: int, there: int | None, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_device(device, wanted, there)


@pytest.mark.parametrize("multiplies", [True, False])
@pytest.mark.parametrize("stored", ["F32", "F16", "BF16"])
def test_the_type_of_weights_follows_from_the_device_and_the_checkpoint(
    stored: str, multiplies: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hardware, "multiplies_bfloat16", lambda: multiplies)
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint(tmp_path)
    vars(checkpoint)["stored_in"] = stored
    on_cpu = "bfloat16" if multiplies and stored == "BF16" else "float32"
    found = [default_dtype(device, checkpoint) for device in ("cpu", "cuda", "cuda:1")]
    assert found == [on_cpu, "bfloat16", "bfloat16"]


@pytest.mark.parametrize("multiplies", [True, False])
def test_a_processor_computes_in_float32_what_it_cannot_multiply(
    multiplies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "multiplies_bfloat16", lambda: multiplies)
    types = "float32", "bfloat16", "float16"
    assert [computed_in(each, "cuda:0") for each in types] == list(types)
    assert [computed_in(each, "cpu") for each in types] == [
        "float32",
        "bfloat16" if multiplies else "float32",
        "float32",
    ]


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx512f avx512_bf16 fsrm\n", True),
        ("processor\t: 0\nflags\t\t: fpu avx512f avx512_bf16x\n", False),
        ("processor\t: 0\nmodel name\t: avx512_bf16 \n", False),
        (None, False),
    ],
)
def test_a_processor_that_multiplies_bfloat16_says_so(
    told: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "cpuinfo"
    if told is not None:
        file.write_text(told)
    monkeypatch.setattr(hardware, "_PROCESSORS", file)
    assert hardware.multiplies_bfloat16.__wrapped__() is expected


@pytest.mark.parametrize(
    ("told", "answer", "expected"),
    [
        ("flags\t\t: fpu amx_bf16 amx_tile amx_int8\n", 0, True),
        ("flags\t\t: fpu amx_bf16 amx_tile amx_int8\n", -1, False),
        ("flags\t\t: fpu amx_tile amx_int8\n", 0, False),
        ("flags\t\t: fpu amx_bf16\n", 0, False),
        ("model name\t: amx_bf16 amx_tile\n", 0, False),
    ],
)
def test_tiles_are_used_where_the_processor_has_them_and_linux_permits_it(
    told: str, answer: int, *, expected: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cpuinfo").write_text(told)
    monkeypatch.setattr(hardware, "_PROCESSORS", tmp_path / "cpuinfo")
    monkeypatch.setattr(hardware.ctypes, "CDLL", lambda _: SimpleNamespace(syscall=lambda *_: answer))
    assert hardware.multiplies_tiles.__wrapped__() is expected


def test_a_container_s_memory_is_bounded_where_its_group_says_so(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) is None, "no control group"
    for said, expected in (("max\n", None), ("4294967296\n", 4 << 30)):
        (tmp_path / "memory.max").write_text(said)
        assert memory_limit(tmp_path) == expected
