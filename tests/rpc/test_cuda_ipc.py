"""Rows that go from an encoder's device memory to the ranks' own, by the CPU's twin of CUDA IPC: both services, whole.

What is tested here is everything but the driver's calls; those need a GPU (`tests/gpu/test_cuda_ipc_on_gpu.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests import pictures
from tests.device_twin.services import twin_encoder, twin_llm
from tests.launch import Service, encoder_server, llm_server
from tests.rpc.pairs import ENCODER_FLAGS, LLM_FLAGS, Pair, about, asked, idle, quiet, sharing, tokens, usable
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
def encoder(checkpoint: Path) -> Iterator[Service]:
    """Two workers with a pool each. A batch has 16 patches, or a picture that has more."""
    with twin_encoder(checkpoint, workers=2, batch_patches=16) as service:
        yield service


@pytest.fixture(scope="module")
def media(encoder: Service) -> Iterator[EncoderClient]:
    with EncoderClient(encoder.address) as client:
        yield client


@contextmanager
def reader(checkpoint: Path, encoder: Service, **more: Any) -> Iterator[Reader]:
    """An LLM service of this encoder for the length of the block; asserts that nothing is held at its end."""
    with (
        twin_llm(checkpoint, encoder.address, **more) as llm,
        LlmClient(llm.address) as text,
        EncoderClient(encoder.address) as media,
    ):
        until(lambda: usable(text, 1), "the encoder is usable")
        until(lambda: text.get_load().encoders[0].cuda_ipc, "the ranks read its device")
        yield Reader(llm, text)
        until(lambda: idle(text) and quiet(media), "nothing is held at the end")
        until(lambda: media.get_load().leases == 0, "no lease is left")


@dataclass(frozen=True, slots=True)
class Reader:
    """An LLM service with mirrors, and a client of it."""

    llm: Service
    text: LlmClient


@dataclass
class Sent:
    """What an encoder sends from now on, by how."""

    media: EncoderClient
    before: Counter[int] = field(init=False)

    def __post_init__(self) -> None:
        self.before = Counter(by_transport(self.media))

    def since(self) -> dict[int, int]:
        return dict(Counter(by_transport(self.media)) - self.before)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_rows_go_from_device_to_device_once_and_the_tokens_are_the_same(
    checkpoint: Path, encoder: Service, media: EncoderClient, qwen3: Pair, ranks: int
) -> None:
    """A video whose four frame groups of 16 patches are batches of their own comes out of both workers' pools."""
    media.flush_cache()
    prompts = [about(file) for file in FILES] + [user(image(FILES[0]), image(FILES[3]), "Both?")]
    with reader(checkpoint, encoder, tp=ranks) as both:
        sent, calls = Sent(media), media.get_load().vit_calls
        assert tokens(both.text, asked(clip())) == tokens(qwen3.text, asked(clip()))
        assert media.get_load().vit_calls == calls + 4
        for rank in (*both.llm.children("llm_service.engine"), *both.llm.children("llm_service.worker")):
            maps = Path(f"/proc/{rank}/maps").read_text()
            assert maps.count("memfd:twin-pool") == 2, "rows came out of both"
        for prompt in prompts:
            assert tokens(both.text, asked(prompt)) == tokens(qwen3.text, asked(prompt))
        load = both.text.get_load()
        assert load.rows_mirrored == load.rows_received > 0
        assert sent.since() == {CUDA: load.rows_received}
        assert 0 < media.get_load().device_pool_bytes <= media.get_load().device_pool_capacity_bytes
        assert CUDA in media.get_info().transports
        assert len(media.get_info().device_pools) == 2


def test_places_that_were_a_mirror_s_and_then_the_arena_s_are_never_mixed_up(checkpoint: Path, qwen3: Pair) -> None:
    """The pictures have 4 to 26 KiB of rows, 84 in all: they push each other out of the pool and of the row memory, so
    that rows come in both ways, to the same places."""
    with (
        twin_encoder(checkpoint, device_pool_bytes="24KiB") as small,
        EncoderClient(small.address) as media,
        reader(checkpoint, small, row_cache_bytes="64KiB", prefix_cache="no") as both,
    ):
        expected = [tokens(qwen3.text, asked(about(file))) for file in FILES]
        for which in (0, 1, 2, 0, 3, 1, 4, 5, 2, 0, 5, 3, 1, 4, 0):
            assert tokens(both.text, asked(about(FILES[which]))) == expected[which], which
        sent = by_transport(media)
        assert sent[CUDA] > 0
        assert sent[SHARED] > 0


def test_without_a_device_in_common_rows_come_by_shared_memory(
    checkpoint: Path, encoder: Service, media: EncoderClient, qwen3: Pair
) -> None:
    """One encoder's pool is on another device, and the one of `qwen3` has none."""
    encoders = {"pool on another device": media, "no pool": qwen3.media}
    with (
        twin_llm(checkpoint, encoder.address, qwen3.encoder.address, device="TWIN-1") as llm,
        LlmClient(llm.address) as text,
    ):
        until(lambda: sharing(text, 2), "the encoders are usable")
        expected, sent = [tokens(qwen3.text, asked(about(file))) for file in FILES], {}
        for each, client in encoders.items():
            client.flush_cache()
            sent[each] = Sent(client)
        assert [tokens(text, asked(about(file))) for file in FILES] == expected
        load = text.get_load()
        assert not any(each.cuda_ipc for each in load.encoders)
        for number in range(40):  # which encoder gets a picture follows from their ports, which are drawn
            ways = {each: set(by.since()) for each, by in sent.items()}
            if all(ways.values()):
                break
            tokens(text, asked(about(pictures.encoded(pictures.noise(96, 64, 9_720 + number)))))
        assert ways == {each: {SHARED} for each in encoders}
        assert load.rows_shared == load.rows_received > 0
        until(lambda: idle(text) and quiet(media), "nothing is held at the end")


def test_who_has_no_mirror_reads_shared_memory(checkpoint: Path, encoder: Service, media: EncoderClient) -> None:
    with llm_server(checkpoint, encoder.address, **LLM_FLAGS) as llm, LlmClient(llm.address) as text:
        until(lambda: sharing(text, 1), "the encoder is usable")
        media.flush_cache()
        sent = Sent(media)
        tokens(text, asked(about(FILES[1])))
        load = text.get_load()
        assert sent.since() == {SHARED: load.rows_received}
        assert not load.encoders[0].cuda_ipc


def test_a_pool_that_cannot_be_opened_is_tried_once(checkpoint: Path, encoder: Service, qwen3: Pair) -> None:
    """The ranks are told that they read the device, and then they do not: they have another idea of where it is."""
    with reader(checkpoint, encoder, environment={"TWIN_BLIND": "yes"}) as both:
        for file in FILES[:3]:
            assert tokens(both.text, asked(about(file))) == tokens(qwen3.text, asked(about(file)))
        load = both.text.get_load()
        assert (load.encode_retries, load.rows_mirrored, load.encoders[0].cuda_ipc) == (1, 0, False)
        assert load.rows_shared == load.rows_received > 0


@pytest.mark.soak
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
