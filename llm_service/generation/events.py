"""What a generation tells its caller: Begun once, logprobs of the prompt, deltas, and Ended once for each choice; or
Begun and Embedded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.stages import Stage
from llm_service.plan import TokenLogprobs
from llm_service.prompt.transcript import Turn
from llm_service.request import PromptLayout


@dataclass(frozen=True, slots=True)
class Begun:
    """The prompt is laid out and computing has begun; `cached` of its tokens came from the prefix cache. The answer
    begins inside of the model's reasoning where that is so (`thinking`). `identities` are those of the prompt's full
    blocks, where prompts that begin alike are expected to find them."""

    layout: PromptLayout
    cached: int
    thinking: bool = False
    identities: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class Computed:
    """The prompt's first `tokens` are computed, for one of its choices."""

    tokens: int


@dataclass(frozen=True, slots=True)
class PromptLogprobsDelta:
    """How likely the prompt's tokens were, from token `first` on."""

    first: int
    tokens: list[int]
    logprobs: list[TokenLogprobs]


@dataclass(slots=True)
class Delta:
    """New tokens of one choice and the text that is certain by now; `logprobs` has one for each token, or none. Of a
    transcript, the text is its words, and `turns` are complete with it."""

    choice: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def add(self, text: str, token: int, logprobs: TokenLogprobs | None) -> None:
        """One more token, with which so much more text is certain."""
        self.text += text
        self.tokens.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)


@dataclass(frozen=True, slots=True)
class Ended:
    """A choice is complete; `reason` is stop, length or structure; `stop_token` is that of `stop_token_ids` which ended
    it. Of its tokens, `reasoning_tokens` are the model's
    reasoning, and `accepted_draft_tokens` are those of `draft_tokens` that were right. `stages` count from the
    request's arrival."""

    choice: int
    reason: str
    stop_text: str
    completion_tokens: int
    reasoning_tokens: int
    stages: dict[str, Stage]
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    stop_token: int | None = None


@dataclass(frozen=True, slots=True)
class Embedded:
    """The prompt is computed: what was `pooled` of its hidden states, float32 [hidden]. `stages` count from the
    request's arrival."""

    pooled: bytes
    stages: dict[str, Stage]


Event = Begun | Computed | PromptLogprobsDelta | Delta | Ended | Embedded
