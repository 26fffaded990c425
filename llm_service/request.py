"""The nouns of a request. They know neither protobuf nor torch."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec

from common.media.item import Header, Media, Modality
from llm_service.families.transcription import Transcription


@dataclass(frozen=True, slots=True)
class MediaItem(Media):
    """One picture, video or clip of a request; `index` counts them in prompt order."""

    index: int = 0


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """A function that the model may call; `parameters` is a JSON Schema, None for a function without any. Calls that
    the model makes by itself are held to it where one of the functions is `strict`."""

    name: str
    description: str
    parameters: dict[str, Any] | None
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model has made."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Message:
    """A chat message; a part is text, or the item that stands there. Calls and reasoning are an assistant's, the id of
    a call is a tool's, whose message is its result."""

    role: str
    parts: tuple[str | MediaItem, ...]
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages, to be laid out by the chat template, and the functions that the model may call; `thinking` None, and no
    `reasoning_effort`: as the template has it. `continues`: the answer goes on behind the last message's text.
    `unanswered`: nothing begins an answer.
    `opening` is what the answer is begun with, special tokens in it by name. `calls_or_form`: an answer that must have
    a form may be calls in its place; `thinks_before_form`: it may begin with reasoning that the model opens itself.
    `variables` are more that the template asks for, by name."""

    messages: tuple[Message, ...]
    tools: tuple[ToolDefinition, ...] = ()
    thinking: bool | None = None
    reasoning_effort: str = ""
    continues: bool = False
    unanswered: bool = False
    opening: str = ""
    calls_or_form: bool = False
    thinks_before_form: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A text that is laid out already, with one placeholder for each item; `bare`: the tokenizer puts nothing around
    it."""

    text: str
    bare: bool = False


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, with one placeholder token for each item."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MediaSlot:
    """Where the item with this index stands: all of it, or, once it is expanded, its next `rows`; of a pruned video,
    those that are kept of its grid's next `grid_rows`."""

    item: int
    modality: Modality
    token: int
    rows: int = 0
    grid_rows: int = 0


@dataclass(frozen=True, slots=True)
class SoundLength:
    """Where the seconds of the item with this index, a sound, stand as a text; below 0: it is not known yet whose."""

    item: int = -1


Piece: TypeAlias = str | int | MediaSlot | SoundLength | list[int]
"""A text to be tokenized, a special token, a place for an item, or for a sound's length, or ids that are final."""


@dataclass(frozen=True, slots=True)
class PiecesPrompt:
    """A prompt as another service has cut it, of the same model: nothing but its items' headers is missing."""

    pieces: tuple[Piece, ...]


Prompt: TypeAlias = ChatPrompt | TextPrompt | TokenPrompt | PiecesPrompt


@dataclass(frozen=True, slots=True)
class Structure:
    """The form that an answer must have; `text` is the contract's field, a choice's options as a JSON list."""

    kind: Literal["json_schema", "regex", "grammar", "choice", "structural_tag"]
    text: str


class Trigger(msgspec.Struct, frozen=True):
    """The token behind which a grammar begins. Where it `recurs` (a call's mark), anything may be said before it and
    again behind what the grammar allows; else (the end of reasoning) it must come before the answer may end. With
    `openings`, runs of tokens, that is so of an answer that begins with one of them: another has the grammar from its
    first token on."""

    token: int
    recurs: bool = False
    openings: tuple[tuple[int, ...], ...] = ()


class ThinkingBound(msgspec.Struct, frozen=True):
    """At most so many tokens of reasoning, which the tokens `begin` open and the token `end` closes; `opened`: the
    answer begins inside of it."""

    tokens: int
    begin: tuple[int, ...]
    end: int
    opened: bool = False


class Pooling(enum.StrEnum):
    """How an embedding is made of a prompt's hidden states, those behind the last norm."""

    LAST = "last"
    """That of the last token."""
    MEAN = "mean"
    """The mean of all."""
    CLS = "cls"
    """That of the first token."""

    @property
    def of_all(self) -> bool:
        """Hidden states from the first one on count, so that no token's may be missing: of a block that the prefix
        cache has, there are none."""
        return self is not Pooling.LAST


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen and when a choice ends, every default filled in. The fields mean what the contract says;
    `grammar` is a checked structure in llguidance's form, empty for none, `grammar_bytes` what it holds when it is
    compiled, and `grammar_trigger` where it begins; None: with the first token. `thinking_bound` bounds reasoning.
    `bad_word_ids` are runs of tokens that an answer cannot have. `allowed_mask` is that of the only tokens that may be
    chosen; empty: any."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: dict[int, float] = {}
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: str = ""
    grammar_bytes: int = 0
    grammar_trigger: Trigger | None = None
    thinking_bound: ThinkingBound | None = None
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    allowed_mask: bytes = b""

    @property
    def is_matched(self) -> bool:
        """Not every token may come next: a matcher says which."""
        return bool(self.grammar) or self.thinking_bound is not None

    @property
    def is_held(self) -> bool:
        """There may be no token that can come next."""
        return self.is_matched or bool(self.allowed_mask)

    @property
    def greedy(self) -> bool:
        """The likeliest token is taken."""
        return self.temperature == 0.0

    @property
    def penalises(self) -> bool:
        """Logits depend on the tokens so far."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    """A LoRA adapter that requests may name; `number` is the engine's name for it, and `digest` what it is. `unloaded`:
    it has no name any more, and is kept for the requests that have begun."""

    name: str
    number: int
    digest: bytes
    rank: int
    in_flight: int = 0
    unloaded: bool = False


@dataclass(frozen=True, slots=True)
class ResumedChoice:
    """What exists of a choice: its output so far; `finished`: nothing more is to be generated or sent of it."""

    index: int
    token_ids: tuple[int, ...]
    finished: bool = False


@dataclass(frozen=True, slots=True)
class Truncation:
    """The most tokens of a prompt; of a longer one the last are kept, or the first where its `end` is cut off."""

    tokens: int
    end: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """A validated request. `deadline` is on the monotonic clock, None where the caller set none. `peer` is the
    connection that it came by, which tells callers apart where no salt does. It may outlive `max_handovers` engines.
    With a `transcription` its answer is the words of a sound, which the model wraps in what that says. With a `pooling`
    it asks for the prompt's embedding in the place of an answer."""

    id: str
    prompt: Prompt
    media: tuple[MediaItem, ...]
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    bad_words: tuple[str, ...] = ()
    structure: Structure | None = None
    thinking_token_budget: int | None = None
    return_prompt_token_ids: bool = False
    salt: str = ""
    priority: int = 0
    deadline: float | None = None
    session: str = ""
    peer: str = ""
    resume: tuple[ResumedChoice, ...] = ()
    max_handovers: int = 0
    adapter: LoadedAdapter | None = None
    transcription: Transcription | None = None
    pooling: Pooling | None = None
    truncation: Truncation | None = None

    @property
    def prefix_space(self) -> str:
        """Requests of different ones share no prefix: the salt, with the adapter that computes keys and values."""
        return self.salt if self.adapter is None else f"{self.salt}\0{self.adapter.digest.hex()}"


@dataclass(frozen=True, slots=True)
class Run:
    """Prompt positions [start, start + count) hold rows [first_row, first_row + count) of an item. Of a pruned video,
    they are those that are kept of its grid's next `grid_rows`."""

    start: int
    first_row: int
    count: int
    grid_rows: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """Where an item's rows are in the prompt. A picture has one run; a video may have one for each frame group."""

    item: int
    header: Header
    runs: tuple[Run, ...]

    @property
    def start(self) -> int:
        """The first position."""
        return self.runs[0].start

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.runs[-1].start + self.runs[-1].count


@dataclass(frozen=True, slots=True)
class PromptLayout:
    """A prompt in its final form: token ids, media spans, and where each token is in time, height and width.

    `positions` is int32 [3, tokens], C-contiguous, as bytes; `mrope_delta` is added to a token's index past the prompt.
    The sequence may have `max_length` tokens, 0: as many as the context.
    """

    ids: list[int]
    spans: list[Span] = field(default_factory=list)
    positions: bytes = b""
    mrope_delta: int = 0
    max_length: int = 0
