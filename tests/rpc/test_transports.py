"""How rows cross between the services: by shared memory where they share a host, inline where not, the same rows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path

import pytest

from common.media.item import Modality
from common.rows.wire import DType, RowLayout
from llm_service.encoders.encoder_cache import EncoderCache
from llm_service.encoders.pool import EncoderPool
from llm_service.encoders.receiver import RowReceiver
from llm_service.encoders.settings import EncoderSettings
from llm_service.request import MediaItem, Request, SamplingParams, TextPrompt
from tests import pictures
from tests.launch import Service, encoder_server, llm_server, stopped
from tests.rpc.pairs import ENCODER_FLAGS, LLM_FLAGS, Pair, about, asked, idle, pair, quiet, tokens, usable
from tests.scrape import scrape
from tests.waiting import until
from twinlens import EncoderClient, LlmClient, image, user, v1

FILES = [pictures.encoded(pictures.noise(96, 64 + 32 * n, 9_000 + n)) for n in range(4)]


@pytest.fixture(scope="module")
def inline(checkpoint: Path) -> Iterator[Pair]:
    """Two services that share no memory."""
    with pair(checkpoint, shared_memory=False, metrics_listen="127.0.0.1:0") as both:
        yield both


def received(llm: Service) -> dict[str, float]:
    """Rows that the LLM service tells Prometheus of, by how they came."""
    pattern = re.compile(r'twinlens_llm_rows_received_total\{transport="(\w+)"\}')
    return {found[1]: rows for name, rows in scrape(llm.metrics).items() if (found := pattern.fullmatch(name))}


def by_transport(client: EncoderClient) -> dict[int, int]:
    """Rows that the encoder has sent, by how. Leased ones count once their readers have let go of them."""
    until(lambda: client.get_load().leases == 0, "every lease is given back")
    return {sent.transport: sent.rows for sent in client.get_load().rows_sent}


def test_on_one_host_rows_are_read_from_shared_memory_and_the_tokens_are_the_same(
    checkpoint: Path, inline: Pair
) -> None:
    with pair(checkpoint, metrics_listen="127.0.0.1:0") as shared:
        until(lambda: shared.text.get_load().encoders[0].shared_memory, "memory is shared")
        for file in FILES:
            assert tokens(shared.text, asked(about(file))) == tokens(inline.text, asked(about(file)))
        load = shared.text.get_load()
        assert load.rows_shared == load.rows_received > 0
        assert by_transport(shared.media) == {v1.TRANSPORT_SHARED_MEMORY: load.rows_received}
        assert received(shared.llm) == {"inline": 0, "shared_memory": load.rows_received, "cuda_ipc": 0, "nixl": 0}
        assert inline.text.get_load().rows_shared == 0
        assert received(inline.llm) == {"inline": load.rows_received, "shared_memory": 0, "cuda_ipc": 0, "nixl": 0}
        assert set(by_transport(inline.media)) == {v1.TRANSPORT_INLINE}


async def test_a_large_item_comes_in_parts_whose_rows_are_those_of_one_stream(inline: Pair) -> None:
    """Through the LLM service's own link in this process, for which 16 rows are large: new to the encoder, then not."""
    file, info = pictures.encoded(pictures.noise(256, 256, 9_050)), inline.media.get_info()
    layout = RowLayout(info.levels, info.width, DType.FLOAT32)
    ours = {"shared_memory": False, "connections": 3, "part_bytes": 16 * layout.row_bytes}
    settings = EncoderSettings(digest=info.digest, layout=layout, merge=2, **ours)
    pool = EncoderPool([inline.encoder.address], settings)
    with closing(EncoderCache(64 * layout.row_bytes, layout)) as cache:
        await pool.start()
        try:
            receiver, before = RowReceiver(pool, cache, 5.0), inline.media.get_load()
            item = MediaItem(Modality.IMAGE, file, field="picture")
            wanted = Request("parts", TextPrompt("x"), (item,), SamplingParams(max_tokens=1))
            brought = []
            for _ in range(2):
                (entry,) = await receiver.acquire(await receiver.fetch_headers(wanted))
                assert entry.filler is not None
                await entry.filler
                assert entry.error is None
                brought.append(bytes(cache.view(entry)))
                receiver.cache.release(entry)
                cache.flush()
        finally:
            await pool.stop()
    sent = [
        event.rows for event in inline.media.encode(v1.EncodeRequest(items=[image(file)])) if event.HasField("rows")
    ]
    assert brought == [b"".join(rows.data for rows in sent)] * 2
    after = inline.media.get_load()
    assert after.vit_calls == before.vit_calls + 1
    assert after.store_hits - before.store_hits == 2 * 3 + 1 + 1, "not every part was asked for by itself"


def test_an_encoder_that_offers_no_memory_sends_rows_inline(checkpoint: Path, inline: Pair) -> None:
    with (
        encoder_server(checkpoint, **ENCODER_FLAGS, shared_memory=False) as encoder,
        llm_server(checkpoint, encoder.address, **LLM_FLAGS) as llm,
        LlmClient(llm.address) as text,
    ):
        until(lambda: usable(text, 1), "the encoder is usable")
        assert tokens(text, asked(about(FILES[0]))) == tokens(inline.text, asked(about(FILES[0])))
        assert (text.get_load().rows_shared, text.get_load().rows_received > 0) == (0, True)


def test_sockets_that_are_files_are_shared_through_a_folder_and_leave_it_empty(
    checkpoint: Path, inline: Pair, tmp_path: Path
) -> None:
    """As between containers; an LLM service without the folder gets its rows inline."""
    with ExitStack() as stack:
        encoder = stack.enter_context(encoder_server(checkpoint, **ENCODER_FLAGS, local_dir=tmp_path))
        assert len(list(tmp_path.iterdir())) == 1
        for folder, shares in ((str(tmp_path), True), ("", False)):
            llm = stack.enter_context(llm_server(checkpoint, encoder.address, **LLM_FLAGS, local_dir=folder))
            text = stack.enter_context(LlmClient(llm.address))
            until(lambda text=text: usable(text, 1), "the encoder is usable")
            if shares:
                until(lambda text=text: text.get_load().encoders[0].shared_memory, "memory is shared")
            assert tokens(text, asked(about(FILES[1]))) == tokens(inline.text, asked(about(FILES[1])))
            assert (text.get_load().rows_shared > 0) == shares
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_is_killed_leaves_no_lease_and_the_next_one_is_served(checkpoint: Path) -> None:
    with (
        encoder_server(checkpoint, **ENCODER_FLAGS) as encoder,
        EncoderClient(encoder.address) as media,
    ):
        for number in range(2):
            with ExitStack() as stack:
                llm = stack.enter_context(llm_server(checkpoint, encoder.address, exit_code=None, **LLM_FLAGS))
                text = stack.enter_context(LlmClient(llm.address))
                until(lambda text=text: text.get_load().encoders[0].shared_memory, "memory is shared")
                tokens(text, asked(about(FILES[number])))
                assert text.get_load().rows_shared > 0
                until(lambda text=text: idle(text), "nothing runs")
                llm.process.kill()
            until(lambda: media.get_load().leases == 0, "no lease is left")
            until(lambda: quiet(media), "no stream is left")


def one_worker_stopped(encoder: Service, number: int) -> AbstractContextManager[None]:
    """One of the workers computes nothing."""
    return stopped(sorted(encoder.children("encoder_service.worker"))[number])


def clip(seed: int) -> v1.ChatMessage:
    """A question about a clip that two workers share: each computes half of its frame groups."""
    block = v1.PixelBlock(data=pictures.frames(40, 320, 240, seed).tobytes(), frames=40, height=240, width=320)
    options = v1.MediaOptions(max_pixels=40 * 320 * 240)
    return user(v1.Media(modality=v1.MODALITY_VIDEO, pixels=block, options=options), "What happens?")


def test_rows_of_a_video_are_read_before_its_last_group_is_computed(checkpoint: Path, inline: Pair) -> None:
    """And a reader that is killed between the two leaves nothing behind. Each time by an encoder of its own: what has
    stood still once is given other work than before."""
    rows = 0
    for number, killed in ((0, False), (1, False), (1, True)):
        with ExitStack() as stack:
            encoder = stack.enter_context(encoder_server(checkpoint, **ENCODER_FLAGS, workers=2))
            media = stack.enter_context(EncoderClient(encoder.address))
            exit_code = None if killed else 0
            llm = stack.enter_context(llm_server(checkpoint, encoder.address, exit_code=exit_code, **LLM_FLAGS))
            text = stack.enter_context(LlmClient(llm.address))
            until(lambda text=text: text.get_load().encoders[0].shared_memory, "memory is shared")
            question = asked(clip(9_500 + 10 * number + killed))
            with one_worker_stopped(encoder, number):
                stream = text.generate(question, timeout=120)
                until(lambda media=media: media.get_load().vit_calls == 1, "half of it is computed")
                if number:  # the stopped worker has the second half
                    until(lambda text=text, rows=rows: text.get_load().rows_shared >= rows // 2, "half has landed")
                half = text.get_load().rows_shared
                assert (media.get_load().running_items, text.get_load().generated_tokens) == (1, 0)
                if killed:
                    llm.process.kill()
                    until(lambda media=media: media.get_load().open_streams == 0, "no stream is left")
                    until(lambda media=media: media.get_load().leases == 0, "no lease is left")
            if not killed:
                early = [token for event in stream for token in event.delta.token_ids]
                assert early == tokens(inline.text, question)
                rows = text.get_load().rows_shared
                assert half == (rows // 2 if number else 0)
            until(lambda media=media: quiet(media), "nothing runs")
            until(lambda media=media: media.get_load().leases == 0, "no lease is left")
