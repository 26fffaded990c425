"""An encoder whose device computes nothing, while its front lives and says so."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from tests import pictures
from tests.launch import encoder_server, llm_server, stopped
from tests.rpc.pairs import ENCODER_FLAGS, LLM_FLAGS, about, asked, idle, quiet, tokens, usable
from tests.waiting import until
from twinlens import EncoderClient, LlmClient

_SEEDS = itertools.count(91_000)


def new_pictures(count: int) -> Iterator[bytes]:
    """Such as no encoder has seen."""
    return (pictures.encoded(pictures.noise(96, 96, next(_SEEDS))) for _ in range(count))


def test_no_picture_waits_for_a_device_that_hangs_and_it_is_used_again_when_it_does_not(checkpoint: Path) -> None:
    flags = {**LLM_FLAGS, "encoder_hedge_seconds": 1, "encode_timeout_seconds": 600}
    with ExitStack() as stack:
        encoders = [stack.enter_context(encoder_server(checkpoint, **ENCODER_FLAGS)) for _ in range(3)]
        media = [stack.enter_context(EncoderClient(encoder.address)) for encoder in encoders]
        llm = stack.enter_context(llm_server(checkpoint, *(encoder.address for encoder in encoders), **flags))
        client = stack.enter_context(LlmClient(llm.address))
        until(lambda: usable(client, 3), "all encoders are usable")
        slow, *others = media
        asking = [asked(about(picture)) for picture in new_pictures(24)]
        with ThreadPoolExecutor(len(asking)) as threads, stopped(*encoders[0].children("encoder_service.worker")):
            said = list(threads.map(lambda each: tokens(client, each), asking))
            hung = slow.get_load()
            assert hung.store_misses > hung.encoded_items == 0, "it was sent some of them"
            assert all(other.get_load().encoded_items for other in others)
            assert client.get_load().encode_retries > 0
            until(lambda: slow.get_load().open_streams == 0, "nobody waits for it any more")

        def sent() -> int:
            (picture,) = new_pictures(1)
            assert tokens(client, asked(about(picture)))
            return slow.get_load().store_misses - hung.store_misses

        until(lambda: sent() > 3, "it is sent pictures again")
        client.flush_cache()
        assert [tokens(client, each) for each in asking] == said
        until(lambda: idle(client) and all(map(quiet, media)), "nothing is held")
