"""CUDA IPC on a GPU: the driver's calls between processes, and both services with pools and mirrors on it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest
import torch

from common.gpu.cuda_ipc import HANDLE_BYTES, CudaMemory
from common.gpu.device_memory import DeviceMemoryError, as_unsigned, driver, row_sum
from llm_service.worker.messages import Pulled, PullRows, UnmapPool
from llm_service.worker.mirror import Mirror
from tests import pictures
from tests.launch import encoder_server, llm_server
from tests.rpc.pairs import ENCODER_FLAGS, LLM_FLAGS, Pair, about, asked, tokens, usable
from tests.rpc.test_transports import by_transport
from tests.waiting import until
from twinlens import EncoderClient, LlmClient, image, user, v1

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda:0")
ROW, ROWS, AT = 4096, 2048, 1 << 20
FILES = [pictures.encoded(pictures.noise(96 + 32 * (n % 3), 64 + 32 * n, 9_700 + n)) for n in range(4)]

OWNER = f"""
import sys, torch
from common.gpu.cuda_ipc import CudaMemory
from tests.gpu.test_cuda_ipc_on_gpu import numbers
pool = CudaMemory().create(torch.device(sys.argv[1]), 16 << 20)
pool.write({AT}, numbers().to(sys.argv[1]).view(torch.uint8))
torch.cuda.synchronize()
print(pool.handle.hex(), pool.device, pool.size, flush=True)
sys.stdin.read()
"""


def numbers() -> torch.Tensor:
    """float32, 8 MiB: 2048 rows of 4 KiB."""
    return torch.randn(ROWS * ROW // 4, generator=torch.Generator().manual_seed(0))


@contextmanager
def owner(device: str = "cuda:0") -> Iterator[tuple[bytes, str, int]]:
    """Another process's pool on a device, with `numbers` in it at AT: its handle, device and size."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, device], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        handle, uuid, size = process.stdout.readline().split()
        yield bytes.fromhex(handle), uuid, int(size)
        process.communicate()


def test_another_process_s_pool_is_read_and_nothing_beyond_it() -> None:
    memory, target = CudaMemory(), torch.zeros(ROWS * ROW, dtype=torch.uint8, device=DEVICE)
    with owner() as (handle, uuid, size):
        assert uuid in memory.reachable([DEVICE])
        assert uuid == f"GPU-{torch.cuda.get_device_properties(DEVICE).uuid}"
        for _ in range(2):  # what was closed can be opened again
            target.zero_()
            mapping = memory.open(DEVICE, handle)
            mapping.read(AT, target)
            assert torch.equal(target.view(torch.float32).cpu(), numbers())
            for offset in (-1, size - len(target) + 1):
                with pytest.raises(DeviceMemoryError):
                    mapping.read(offset, target)
            mapping.close()


def test_what_is_no_handle_is_refused_by_name() -> None:
    for handle in (b"", bytes(HANDLE_BYTES - 1), bytes(HANDLE_BYTES)):
        with pytest.raises(DeviceMemoryError):
            CudaMemory().open(DEVICE, handle)


def test_a_pool_that_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(DeviceMemoryError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        CudaMemory().create(DEVICE, 1 << 50)
    pool = CudaMemory().create(DEVICE, 1)
    assert pool.size == 2 << 20
    pool.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_and_checks_are_the_same_as_on_a_cpu(dtype: torch.dtype) -> None:
    data = numbers().to(dtype).view(torch.uint8)
    assert int(row_sum(data.to(DEVICE), ROW)) == int(row_sum(data, ROW))
    for wrong in (float("nan"), float("inf"), -float("inf")):
        poisoned = data.view(dtype).clone().to(DEVICE)
        poisoned[12345] = wrong
        assert not torch.stack(poisoned.aminmax()).isfinite().all()


@pytest.mark.parametrize("peer", [0, 1])
def test_a_mirror_pulls_rows_out_of_a_pool_of_its_own_gpu_or_of_a_peer(peer: int) -> None:
    if peer >= torch.cuda.device_count() or (peer and not torch.cuda.can_device_access_peer(0, peer)):
        pytest.skip("there is no such peer")
    mirror = Mirror(driver(DEVICE), DEVICE, 16 << 20, ROW, torch.float32)
    data = numbers().view(torch.uint8)
    with owner(f"cuda:{peer}") as (handle, uuid, _):
        assert uuid in CudaMemory().reachable([DEVICE])
        good = PullRows(
            id=1,
            region="pool",
            handle=handle,
            source=AT,
            target=4 * ROW,
            size=len(data),
            row_sum=as_unsigned(int(row_sum(data, ROW))),
        )
        shifted = msgspec.structs.replace(good, source=AT + ROW)
        assert mirror.obey(shifted, int) is Pulled.DAMAGED
        assert mirror.obey(good, int) is Pulled.LANDED
        assert torch.equal(mirror.bytes_of(4 * ROW, 4 * ROW + len(data)).cpu(), data)
        mirror.obey(UnmapPool("pool"), int)


@contextmanager
def pair_on(folder: Path, ranks: int, **llm_flags: object) -> Iterator[Pair]:
    """Both services on the first GPU, or the LLM service on several of them."""
    with ExitStack() as stack:
        encoder = stack.enter_context(
            encoder_server(
                folder, light=False, **ENCODER_FLAGS, device="cuda:0", dtype="float32", device_pool_bytes="64MiB"
            )
        )
        given = {**LLM_FLAGS, "device": "cuda:0", "dtype": "float32", "tp": ranks, **llm_flags}
        llm = stack.enter_context(llm_server(folder, encoder.address, light=False, **given))
        text = stack.enter_context(LlmClient(llm.address))
        media = stack.enter_context(EncoderClient(encoder.address))
        until(lambda: usable(text, 1), "the encoder is usable")
        yield Pair(folder, encoder, llm, media, text)


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_between_services_stay_on_gpus_and_the_tokens_are_those_of_shared_memory(
    ranks: int, checkpoints: Callable[..., Path]
) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip("there are too few GPUs")
    folder = checkpoints("qwen3_vl")
    prompts = [about(file) for file in FILES] + [user(image(FILES[0]), image(FILES[1]), "Both?")]
    with pair_on(folder, ranks) as shared:
        expected = [tokens(shared.text, asked(prompt)) for prompt in prompts]
        assert shared.text.get_load().rows_mirrored == 0
    with pair_on(folder, ranks, row_mirror="yes") as both:
        until(lambda: both.text.get_load().encoders[0].cuda_ipc, "every rank reads the encoder's GPU")
        assert [tokens(both.text, asked(prompt)) for prompt in prompts] == expected
        load = both.text.get_load()
        assert load.rows_mirrored == load.rows_received > 0
        assert set(by_transport(both.media)) == {v1.TRANSPORT_CUDA_IPC}
        until(lambda: both.media.get_load().leases == 0, "every lease is given back")
