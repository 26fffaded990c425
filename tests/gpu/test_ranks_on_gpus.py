"""The LLM service on one GPU and on two, over NCCL with its sums in the graphs: the tokens of the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests import pictures
from tests.launch import encoder_server, llm_server
from tests.rpc.pairs import ENCODER_FLAGS, LLM_FLAGS, about, asked, greedy, tokens, usable
from tests.waiting import until
from twinlens import LlmClient, user

pytestmark = pytest.mark.gpu

PROMPTS = [
    about(pictures.encoded(pictures.photograph("coffee").resize((160, 120)))),
    user("Tell me about two red circles."),
]
WHOLE = {"dtype": "float32"}


@contextmanager
def llm(folder: Path, encoder: str, **flags: object) -> Iterator[LlmClient]:
    with (
        llm_server(folder, encoder, light=False, **{**LLM_FLAGS, **WHOLE, **flags}) as service,
        LlmClient(service.address) as client,
    ):
        until(lambda: usable(client, 1), "the encoder is usable")
        yield client


@pytest.mark.parametrize("graphs", ["auto", "off"])
@pytest.mark.parametrize(("ranks", "symmetric"), [(1, False), (2, False), (2, True)])
def test_the_service_gives_the_tokens_of_the_cpu(
    ranks: int, symmetric: bool, graphs: str, checkpoints: Callable[..., Path]
) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip("there are too few GPUs")
    folder = checkpoints("qwen3_vl")
    memory = {"symmetric_memory": "yes"} if symmetric else {}
    with encoder_server(folder, light=False, **ENCODER_FLAGS, **WHOLE, device="cpu") as encoder:
        with llm(folder, encoder.address, device="cpu") as here:
            expected = [tokens(here, asked(prompt, greedy(32))) for prompt in PROMPTS]
        with llm(folder, encoder.address, device="cuda:0", tp=ranks, graphs=graphs, **memory) as there:
            assert [tokens(there, asked(prompt, greedy(32))) for prompt in PROMPTS] == expected
            assert list(there.get_info().devices) == [f"cuda:{rank}" for rank in range(ranks)]
