"""Steps on a GPU that there is not: nothing on their way asks the host, but for rows that come from there."""

from __future__ import annotations

import msgspec
import pytest
import torch

pytest.importorskip("triton")

from benchmarks.llm_device import config_of, step
from common.arena import SharedBuffer
from llm_service.layers.attention import metadata
from llm_service.layers.group import ALONE
from llm_service.models.decoder import Decoder
from llm_service.plan import Draw, RowSlice
from llm_service.worker import gpu_sampler, model_runner, sampler
from llm_service.worker.caches import Caches
from llm_service.worker.graphs import CaptureBounds, GraphRunner
from llm_service.worker.model_runner import ModelRunner
from llm_service.worker.row_arena import RowArena
from tests.fake_gpu import GPU, OnHost, Recording, fake_gpu

pytestmark = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this torch was built without CUDA")

LEVELS = 4
STEPS = {
    "decode": [(20, 1), (33, 1)],
    "verify": [(20, 3), (33, 1)],
    "prefill": [(0, 20), (33, 1)],
    "eager": [(0, 100), (33, 1)],
}
DRAWS = [
    Draw(at=0, temperature=0.7, top_p=0.9, top_k=20, uniform=0.3, logprobs=3),
    Draw(at=1, prompt=bytes(40), output=bytes(8), carried=0, repetition_penalty=1.4, logit_bias={4: 2.0}, banned=(7,)),
]
MOVERS = (model_runner, gpu_sampler, sampler, metadata)


class Unread:
    """What would go to the host."""

    def __init__(self, source: torch.Tensor) -> None:
        assert source.device == GPU


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_a_step_is_launched_and_captured_without_a_question_to_the_host(
    experts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "ToHost", Unread)
    memory = SharedBuffer.create("rows", 1 << 20)
    with fake_gpu(*MOVERS) as launched:
        decoder = Decoder(config_of(2, experts=experts, tiny=True), ALONE, torch.bfloat16, GPU)
        decoder.finalize()
        caches = Caches(decoder.mixers(), 64, 16, torch.bfloat16, GPU, attention="triton")
        runner = ModelRunner(decoder, RowArena(memory.view, LEVELS, decoder.config.hidden_size, torch.bfloat16), caches)
        runner._draw = gpu_sampler.draw
        assert not runner.not_capturable()
        capture, bounds = Recording(), CaptureBounds(6, 64, 512, LEVELS, drafts=3, draft_rows=16)
        runner.graphs = GraphRunner(decoder, caches, bounds, capture, max_bytes=1, agree=lambda number: number)
        assert capture.on_host == []
        assert {"attention_kernel", "combine_kernel", "store_kernel", "norm_kernel"} <= set(launched)
        assert ("route_kernel" in launched) == experts
        for name, chunks in STEPS.items():
            rows = [RowSlice(2, 0, 5)] if chunks[0][0] == 0 else []
            plan = msgspec.structs.replace(step(chunks), rows=rows, draws=DRAWS)
            with OnHost() as watch:
                runner.launch(plan)
            wanted = {"slice", "view", "to", "_to_copy"} if rows else set()
            assert set(watch.seen) <= wanted, name
            assert watch.seen.count("to") + watch.seen.count("_to_copy") <= len(rows), name
        assert runner.graphs.replays == len(STEPS) - 1
        assert {"adjust_kernel", "draw_kernel"} <= set(launched)


def test_what_asks_the_device_for_a_number_is_told() -> None:
    with fake_gpu(), OnHost() as watch:
        number = torch.empty(3, device=GPU)
        with pytest.raises(Exception, match="local_scalar_dense"):
            number.sum().item()
        number.to("cpu")
        assert watch.seen, "a copy to the host"
