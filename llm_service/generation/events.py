"""What a generation tells its caller: Begun once, scores of the prompt, deltas, and Ended once for each choice."""

from __future__ import annotations

from dataclasses import dataclass

from common.stages import Stage
from llm_service.plan import TokenLogprobs
from llm_service.request import PromptLayout


@dataclass(frozen=True, slots=True)
class Begun:
    """The prompt is laid out and computing has begun; `cached` of its tokens came from the prefix cache."""

    layout: PromptLayout
    cached: int


@dataclass(frozen=True, slots=True)
class PromptScores:
    """How likely the prompt's tokens were, from token `first` on."""

    first: int
    tokens: list[int]
    logprobs: list[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one choice and the text that is certain by now."""

    choice: int
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class Ended:
    """A choice is complete; `reason` is stop, length or structure. `stages` count from the request's arrival."""

    choice: int
    reason: str
    stop_text: str
    completion_tokens: int
    stages: dict[str, Stage]


Event = Begun | PromptScores | Delta | Ended
