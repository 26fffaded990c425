"""How likely a prompt was, over the wire: in order, once, and as the reference has it, whatever is cached."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from testkit import reference
from tests import pictures
from tests.rpc.pairs import Pair, answer, asked, greedy
from twinlens import image, user, v1

QUESTION = "What is in the picture?"
SHOWN = Image.fromarray(np.random.default_rng(41).integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize((120, 90))


def events(both: Pair, request: v1.GenerateRequest) -> list[v1.GenerateResponse]:
    with both.text.generate(request) as stream:
        return list(stream)


def test_a_prompt_is_scored_once_before_its_first_token_though_it_is_cached(qwen3: Pair) -> None:
    message = user(image(pictures.encoded(SHOWN)), QUESTION)
    answer(qwen3.text, asked(message))
    said = events(qwen3, asked(message, greedy(4, prompt_logprobs=3, n=2)))
    assert said[0].started.cached_tokens == 0
    scored = [event.delta.prompt for event in said if event.delta.HasField("prompt")]
    deltas = [event.delta for event in said if event.HasField("delta")]
    assert all(delta.HasField("prompt") for delta in deltas[: len(scored)])
    assert sum(len(delta.token_ids) for delta in deltas[len(scored) :]) == 8
    places = [part.first + n for part in scored for n in range(len(part.token_ids))]
    assert places == list(range(1, said[0].started.prompt_tokens))

    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    inputs = reference.reference_inputs(qwen3.checkpoint, [{"role": "user", "content": content}], [SHOWN])
    ids = inputs["input_ids"][0].tolist()
    assert [token for part in scored for token in part.token_ids] == ids[1:]
    wanted = reference.reference_logits(qwen3.checkpoint, inputs).double().log_softmax(-1)
    given = [each for part in scored for each in part.logprobs]
    assert [each.logprob for each in given] == pytest.approx(
        [float(wanted[n, token]) for n, token in enumerate(ids[1:])], rel=1e-4, abs=1e-4
    )
    for n, each in enumerate(given):
        assert [top.logprob for top in each.top] == pytest.approx(wanted[n].topk(3).values.tolist(), rel=1e-4, abs=1e-4)


def test_it_changes_no_token(qwen3: Pair) -> None:
    plain, scored = (
        answer(qwen3.text, asked(user("Tell me."), greedy(16, **more))) for more in ({}, {"prompt_logprobs": 0})
    )
    assert scored.choices[0].token_ids == plain.choices[0].token_ids
