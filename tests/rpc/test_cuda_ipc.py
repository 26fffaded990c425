"""Rows that go from an encoder's device memory to the ranks' own, by the CPU's twin of CUDA IPC: both services, whole.

What is tested here is everything but the driver's calls; those need a GPU (`tests/gpu/test_cuda_ipc_on_gpu.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import pictures
from tests.device_twin import environ
from tests.device_twin.services import flags, twin_encoder, twin_llm, twin_pair
from tests.launch import encoder_server, launch, llm_server
from tests.rpc.pairs import ENCODER_FLAGS, LLM_FLAGS, Pair, about, asked, pair, tokens, usable
from tests.rpc.test_transports import by_transport
from tests.waiting import until
from twinlens import EncoderClient, LlmClient, image, user, v1

CUDA, SHARED = v1.TRANSPORT_CUDA_IPC, v1.TRANSPORT_SHARED_MEMORY
FILES = [pictures.encoded(pictures.noise(96 + 32 * (n % 3), 64 + 32 * n, 9_700 + n)) for n in range(6)]
CLIP = v1.Media(
    modality=v1.MODALITY_VIDEO,
    pixels=v1.PixelBlock(data=pictures.noise(64, 64 * 8, 9_799).tobytes(), frames=8, height=64, width=64),
)


def clip(question: str = "What happens?") -> v1.ChatMessage:
    return v1.ChatMessage(role="user", parts=[v1.ChatPart(media=CLIP), v1.ChatPart(text=question)])


@pytest.fixture(scope="module")
def checkpoint(checkpoints: Callable[..., Path]) -> Path:
    return checkpoints("qwen3_vl")


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Iterator[Pair]:
    """Two services that share nothing: what the tokens are."""
    with pair(checkpoint, light=False, shared_memory=False) as both:
        yield both


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_go_from_device_to_device_once_and_the_tokens_are_the_same(
    checkpoint: Path, plain: Pair, ranks: int
) -> None:
    prompts = [about(file) for file in FILES] + [user(image(FILES[0]), image(FILES[3]), "Both?"), clip()]
    with twin_pair(checkpoint, tp=ranks) as both:
        for prompt in prompts:
            assert tokens(both.text, asked(prompt)) == tokens(plain.text, asked(prompt))
        load = both.text.get_load()
        assert load.rows_mirrored == load.rows_received > 0
        assert by_transport(both.media) == {CUDA: load.rows_received}
        assert 0 < both.media.get_load().device_pool_bytes <= both.media.get_load().device_pool_capacity_bytes
        assert CUDA in both.media.get_info().transports


def test_places_that_were_a_mirror_s_and_then_the_arena_s_are_never_mixed_up(checkpoint: Path, plain: Pair) -> None:
    """The pictures have 4 to 26 KiB of rows, 84 in all: they push each other out of the pool and of the row memory, so
    that rows come in both ways, to the same places."""
    with (
        twin_encoder(checkpoint, device_pool_bytes="24KiB") as encoder,
        twin_llm(checkpoint, encoder.address, row_cache_bytes="64KiB", prefix_cache="no") as llm,
        LlmClient(llm.address) as text,
        EncoderClient(encoder.address) as media,
    ):
        until(lambda: usable(text, 1), "the encoder is usable")
        until(lambda: text.get_load().encoders[0].cuda_ipc, "the ranks read its device")
        expected = [tokens(plain.text, asked(about(file))) for file in FILES]
        for which in (0, 1, 2, 0, 3, 1, 4, 5, 2, 0, 5, 3, 1, 4, 0):
            assert tokens(text, asked(about(FILES[which]))) == expected[which], which
        sent = by_transport(media)
        assert sent[CUDA] > 0
        assert sent[SHARED] > 0


def test_a_video_that_two_workers_share_comes_out_of_both_of_their_pools(checkpoint: Path, plain: Pair) -> None:
    """Four frame groups of 16 patches, each of which is a batch of its own."""
    with (
        twin_encoder(checkpoint, workers=2, batch_patches=16) as encoder,
        twin_llm(checkpoint, encoder.address) as llm,
        LlmClient(llm.address) as text,
        EncoderClient(encoder.address) as media,
    ):
        until(lambda: usable(text, 1), "the encoder is usable")
        until(lambda: text.get_load().encoders[0].cuda_ipc, "the ranks read its device")
        assert tokens(text, asked(clip())) == tokens(plain.text, asked(clip()))
        assert media.get_load().vit_calls == 4
        assert len(media.get_info().device_pools) == 2
        assert by_transport(media) == {CUDA: text.get_load().rows_mirrored}
        (engine,) = llm.children("llm_service.engine")
        maps = Path(f"/proc/{engine}/maps").read_text()
        assert maps.count("memfd:twin-pool") == 2, "rows came out of both"


@pytest.mark.parametrize("why", ["another device", "no pool", "no mirror"])
def test_without_a_device_in_common_rows_come_by_shared_memory(checkpoint: Path, plain: Pair, why: str) -> None:
    with (
        twin_encoder(checkpoint, device_pool_bytes=0 if why == "no pool" else "8MiB") as encoder,
        twin_llm(
            checkpoint,
            encoder.address,
            device="TWIN-1" if why == "another device" else "TWIN-0",
            row_mirror="no" if why == "no mirror" else "yes",
        ) as llm,
        LlmClient(llm.address) as text,
        EncoderClient(encoder.address) as media,
    ):
        until(lambda: usable(text, 1), "the encoder is usable")
        assert tokens(text, asked(about(FILES[1]))) == tokens(plain.text, asked(about(FILES[1])))
        assert set(by_transport(media)) == {SHARED}
        assert not text.get_load().encoders[0].cuda_ipc


def test_a_pool_that_cannot_be_opened_is_tried_once(checkpoint: Path, plain: Pair) -> None:
    """The ranks are told that they read the device, and then they do not: they have another idea of where it is."""
    with (
        twin_encoder(checkpoint) as encoder,
        launch(
            "llm_service",
            *flags(model=checkpoint, listen="127.0.0.1:0", encoders=encoder.address, row_mirror="yes", **LLM_FLAGS),
            environ={**environ(), "TWIN_BLIND": "yes"},
        ) as llm,
        LlmClient(llm.address) as text,
        EncoderClient(encoder.address) as media,
    ):
        until(lambda: usable(text, 1), "the encoder is usable")
        until(lambda: text.get_load().encoders[0].cuda_ipc, "the ranks are taken to read its device")
        for file in FILES[:3]:
            assert tokens(text, asked(about(file))) == tokens(plain.text, asked(about(file)))
        load = text.get_load()
        assert (load.encode_retries, load.rows_mirrored, load.encoders[0].cuda_ipc) == (1, 0, False)
        assert load.rows_shared == load.rows_received > 0
        until(lambda: media.get_load().leases == 0, "nothing is leased")


def test_a_cpu_is_no_gpu(checkpoint: Path) -> None:
    """Without the twin, that is for anybody but these tests, both options are refused by name."""
    with (
        pytest.raises(RuntimeError, match="a cpu has no memory of its own to share: this needs a GPU"),
        encoder_server(checkpoint, light=False, **ENCODER_FLAGS, device="cpu", device_pool_bytes="8MiB"),
    ):
        pass
    with (
        pytest.raises(RuntimeError, match="--row-mirror: a cpu has no memory of its own to share"),
        llm_server(checkpoint, light=False, **LLM_FLAGS, device="cpu", row_mirror="yes"),
    ):
        pass
