from __future__ import annotations

from tests.unit.twinlens.fakes import script
from twinlens import Answer, v1


def told(*events: v1.GenerateResponse) -> Answer:
    answer = Answer()
    for event in events:
        answer.add(event)
    return answer


def test_a_whole_stream_becomes_an_answer() -> None:
    answer = told(*script(v1.GenerateRequest(request_id="r")))
    assert answer.text == "A red circle."
    assert answer.choices[0].token_ids == [0, 1, 2]
    assert answer.choices[0].reason == v1.FINISH_REASON_STOP
    assert answer.usage.cached_tokens == 4
    assert answer.timings == {"prefill": 0.0123456}
    assert answer.started.request_id == "r"


def test_scores_of_the_prompt_are_kept_apart_from_those_of_the_choice() -> None:
    sampling = v1.SamplingParams(prompt_logprobs=1, logprobs=0)
    answer = told(*script(v1.GenerateRequest(sampling=sampling)))
    assert answer.prompt_token_ids == [7]
    assert [each.logprob for each in answer.prompt_logprobs] == [-0.5]
    assert [each.logprob for each in answer.choices[0].logprobs] == [-0.125] * 3
    assert answer.choices[0].token_ids == [0, 1, 2]


def test_choices_that_interleave_are_kept_apart() -> None:
    deltas = [(1, "b"), (0, "a"), (1, "d"), (0, "c")]
    answer = told(*(v1.GenerateResponse(delta=v1.GenerateDelta(index=i, text=text)) for i, text in deltas))
    assert [choice.text for choice in answer.choices] == ["ac", "bd"]
    assert answer.text == "ac"


def test_an_answer_without_events_is_empty() -> None:
    answer = told()
    assert (answer.text, answer.timings, answer.usage) == ("", {}, v1.Usage())
