"""The nouns of a request, without protobuf or torch."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
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
    """A function that the model may call; `parameters` is a JSON Schema, None if it takes none. If one of the functions
    is `strict`, the model's calls are held to its schema."""

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
    """A chat message; a part is a text or an item. `calls` and `reasoning` belong to an assistant's message; the id of
    a call belongs to a tool's message with its result."""

    role: str
    parts: tuple[str | MediaItem, ...]
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages for the chat template, and the functions that the model may call. `thinking` None and an empty
    `reasoning_effort` mean the template's default. `continues`: the answer continues the last message's text.
    `unanswered`: no answer is begun. `opening` is the beginning of the answer, with special tokens by name.
    `calls_or_form`: an answer with a form may be calls instead; `thinks_before_form`: it may begin with reasoning that
    the model opens itself. `variables` are further variables of the template."""

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
    """The place of the item with this index: all of it, or, once expanded, its next `rows`; for a pruned video, those
    kept of its grid's next `grid_rows`."""

    item: int
    modality: Modality
    token: int
    rows: int = 0
    grid_rows: int = 0


@dataclass(frozen=True, slots=True)
class SoundLength:
    """The place of a sound's length in seconds as text, by the index of the item; below 0: not assigned yet."""

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
    """The token behind which a grammar begins. If it `recurs` (the mark of a call), anything may precede it and follow
    what the grammar allows; otherwise (the end of reasoning) it must occur before the answer may end. With `openings`,
    runs of tokens, this holds for answers that begin with one of these; others follow the grammar from the first token
    on."""

    token: int
    recurs: bool = False
    openings: tuple[tuple[int, ...], ...] = ()


class ThinkingBound(msgspec.Struct, frozen=True):
    """At most so many tokens of reasoning, which the tokens `begin` open and the token `end` closes; `opened`: the
    answer begins inside it."""

    tokens: int
    begin: tuple[int, ...]
    end: int
    opened: bool = False


class Pooling(enum.StrEnum):
    """How an embedding is made of a prompt's hidden states after the final norm."""

    LAST = "last"
    """That of the last token."""
    MEAN = "mean"
    """The mean of all."""
    CLS = "cls"
    """That of the first token."""

    @property
    def of_all(self) -> bool:
        """Whether hidden states from the first token on count, so that cached blocks, which have none, cannot be
        used."""
        return self is not Pooling.LAST


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen and when a choice ends, with all defaults filled in. Fields mean what the contract says.
    `grammar` is a checked structure in llguidance's form, empty for none, `grammar_bytes` its compiled size, and
    `grammar_trigger` where it begins; None: with the first token. `thinking_bound` bounds reasoning. `bad_word_ids` are
    runs of tokens that an answer must not contain. `allowed_mask` allows only some tokens; empty: all."""

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
        """Whether a matcher restricts the next token."""
        return bool(self.grammar) or self.thinking_bound is not None

    @property
    def is_constrained(self) -> bool:
        """Whether it can happen that no token is allowed."""
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
    """A LoRA adapter that requests may name; `number` is its number in the engine, and `digest` identifies its content.
    `unloaded`: it has lost its name, and is kept for requests in progress."""

    name: str
    number: int
    digest: bytes
    rank: int
    in_flight: int = 0
    unloaded: bool = False


@dataclass(frozen=True, slots=True)
class ResumedChoice:
    """The output of a choice so far; `finished`: nothing more is generated or sent for it."""

    index: int
    token_ids: tuple[int, ...]
    finished: bool = False


@dataclass(frozen=True, slots=True)
class Truncation:
    """The most tokens of a prompt. Of a longer one the last tokens are kept, or the first if `end` is cut off."""

    tokens: int
    end: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """A validated request. `deadline` is on the monotonic clock, None without one. `peer` is its connection, which
    tells callers apart if no salt does. It may outlive `max_handovers` engines. With a `transcription` its answer is
    the words of a sound, wrapped in the model's own way. With a `pooling` it asks for an embedding of the prompt
    instead of an answer."""

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


class MediaRun(msgspec.Struct, frozen=True, array_like=True, order=True, gc=False):
    """Positions [begin, begin + count), usually of a prompt, hold rows [first_row, first_row + count) of an item. For a
    pruned video, these are the rows kept of its grid's next `grid_rows`."""

    begin: int
    first_row: int
    count: int
    grid_rows: int = 0

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.begin + self.count


@dataclass(frozen=True, slots=True)
class Span:
    """An item's rows in the prompt. A picture has one run; a video may have one for each group of frames."""

    item: int
    header: Header
    runs: tuple[MediaRun, ...]

    @property
    def begin(self) -> int:
        """The first position."""
        return self.runs[0].begin

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.runs[-1].end


@dataclass(frozen=True, slots=True)
class PromptLayout:
    """A prompt in its final form: token ids, media spans, and each token's position in time, height and width.

    `positions` is int32 [3, tokens], C-contiguous, as bytes; `mrope_delta` is added to a token's index past the prompt.
    The sequence may have `max_length` tokens, 0: as many as the context. `identities` are those of the full blocks, if
    prompts that begin alike can find these.
    """

    ids: list[int]
    spans: list[Span] = field(default_factory=list)
    positions: bytes = b""
    mrope_delta: int = 0
    max_length: int = 0
    identities: Sequence[bytes] = ()

    def reusable(self, block_size: int) -> Sequence[bytes]:
        """The identities of the blocks that may be taken from a cache: at least one token must be computed.

        >>> PromptLayout([1, 2, 3, 4], identities=[b"1 2", b"3 4"]).reusable(2)
        [b'1 2']
        """
        return self.identities[: (len(self.ids) - 1) // block_size]
