"""What passes between the front and the engine process. Request ids here are numbers that the front gives."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from llm_service.model_config.served import Weights
from llm_service.plan import TokenLogprobs
from llm_service.request import Pooling, SamplingParams
from llm_service.settings import EngineSettings
from llm_service.worker.messages import InvalidateRows, PullRows, UnmapPool

NOWHERE = -1
"""The offset of an item that has no place in the arena: the prefix cache is expected to cover it."""


class ItemRows(msgspec.Struct, frozen=True, array_like=True):
    """An item of a prompt."""

    key: bytes
    """Its `Header.rows_key`."""
    offset: int
    """Where its rows are, or will land, in the row arena, in bytes; or NOWHERE."""
    runs: list[tuple[int, int, int]]
    """(first prompt position, first row, count)."""
    landed: int
    """Rows that are there, from the first on."""


class Resumed(msgspec.Struct, frozen=True, array_like=True):
    """What exists of a choice: its output, int32 [m]; `finished`: nothing more is to be generated of it."""

    choice: int
    token_ids: bytes
    finished: bool = False


class Add(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A new request."""

    id: int
    token_ids: bytes
    """int32 [n]."""
    positions: bytes
    """int32 [3, n]: time, height and width."""
    mrope_delta: int
    """A token at index i past the prompt is at i + mrope_delta in all three."""
    items: list[ItemRows]
    sampling: SamplingParams
    salt: str
    priority: int
    deadline: float | None
    """On the monotonic clock."""
    session: int = 0
    """The number of its session, 0 for none."""
    resume: list[Resumed] = []
    """Choices that go on behind what they have; at least one is not finished."""
    with_logprobs: int = 0
    """Tokens of the prompt, from the first on, that have their logprobs already."""
    adapter: int = 0
    """The number of one that is loaded, 0 for none."""
    adapter_digest: bytes = b""
    max_length: int = 0
    """Tokens that each sequence may have, 0: as many as the context."""
    pooling: Pooling | None = None
    """The request ends when its prompt is computed, and is told that `Pooled` in place of tokens."""
    identities: bytes = b""
    """Those of the prompt's first full blocks, one behind the other, as far as they have been worked out already."""


class Landed(msgspec.Struct, frozen=True, tag=True):
    """The first `rows` rows of an item have landed."""

    id: int
    item: int
    rows: int


class RowsPlaced(msgspec.Struct, frozen=True, tag=True):
    """What `RowsNeeded` asked for: each item of the request has a place, as (offset, rows that have landed there)."""

    id: int
    places: list[tuple[int, int]]


class PromptLogprobsTaken(msgspec.Struct, frozen=True, tag=True):
    """The caller has taken what was `PromptLogprobs` of the request's prompt, up to the token before token `before`."""

    id: int
    before: int


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End a request, or one choice of it (-1: all); no more is to be said of it."""

    id: int
    choice: int = -1


class EndSessions(msgspec.Struct, frozen=True, tag=True):
    """These sessions are over: what is kept for them goes as the rest does."""

    sessions: list[int]


class Flush(msgspec.Struct, frozen=True, tag=True):
    """Forget cached blocks that no request uses."""


class FindBlocks(msgspec.Struct, frozen=True, tag=True):
    """Say how many of these are cached, from the first one on. To this and what follows `BlocksAnswer` answers, by the
    `id` of the exchange."""

    id: int
    identities: list[bytes]


class LendBlocks(msgspec.Struct, frozen=True, tag=True):
    """Keep as many of these as are cached, up to the first that is not, where the front can read them on the host,
    until `BlocksRead`."""

    id: int
    identities: list[bytes]


class BlocksRead(msgspec.Struct, frozen=True, tag=True):
    """What this exchange was lent is read no more."""

    id: int


class AwaitBlocks(msgspec.Struct, frozen=True, tag=True):
    """Set places of the host aside for these blocks, or for as many of the first as there is room for. The front writes
    there until `BlocksArrived`."""

    id: int
    identities: list[bytes]


class BlocksArrived(msgspec.Struct, frozen=True, tag=True):
    """The first `count` of the blocks that were awaited are where they belong; no others will come."""

    id: int
    count: int


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Read the adapter in a folder, which is relative to the one that is allowed, and keep it under a number that no
    other has had. `digest`: what it was when it was read before, which it is to be again; empty: anything."""

    id: int
    path: str
    digest: bytes = b""


class DropAdapter(msgspec.Struct, frozen=True, tag=True):
    """Let go of an adapter: every request that has it is over."""

    id: int


class GetState(msgspec.Struct, frozen=True, tag=True):
    """Report `State`."""


ToEngine = (
    EngineSettings
    | Add
    | Landed
    | RowsPlaced
    | PromptLogprobsTaken
    | Abort
    | EndSessions
    | LoadAdapter
    | DropAdapter
    | FindBlocks
    | LendBlocks
    | BlocksRead
    | AwaitBlocks
    | BlocksArrived
    | Flush
    | GetState
    | PullRows
    | InvalidateRows
    | UnmapPool
)


class Ready(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The model is loaded and warm."""

    max_context: int
    """Tokens of the longest sequence."""
    kv_blocks: int
    step_tokens: int
    """Tokens of the largest step."""
    prefix_caching: bool = False
    """Computed blocks are used again for prompts that begin alike."""
    devices: list[str]
    """The ranks'."""
    reachable: list[str] = []
    """UUIDs of the devices whose memory all ranks can read, where they keep mirrors of the row arena."""
    weights: Weights = Weights()
    """Those of rank 0."""
    waits: int = 0
    """How often steps of one token wait for a GPU where they should not."""
    place_bytes: int = 0
    """What a block takes of a rank's host memory; 0 where there is none that the front reads as well."""


class Unable(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot serve what it was told to; `why` is for the operator."""

    why: str


class Defect(msgspec.Struct, frozen=True, tag=True):
    """The engine ends for an error of its own; `what` it is, and where, is for the operator."""

    what: str


class Started(msgspec.Struct, frozen=True, tag=True):
    """The first of a request's choices runs; `cached` prompt tokens came from the prefix cache."""

    id: int
    cached: int


class RowsNeeded(msgspec.Struct, frozen=True, tag=True):
    """The cache does not cover items of a request that are nowhere. The request waits until all of its items are
    placed; until then no step reads any of their rows, wherever they were before."""

    id: int


class RowsRead(msgspec.Struct, frozen=True, tag=True):
    """All choices of these requests have computed the places of their media: no step reads their rows any more, unless
    `RowsNeeded` asks for places anew."""

    ids: list[int]


class Token(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A token of one choice; `ended` is empty, stop, length or structure. `drafts` were verified by the step that chose
    it, and it is the first that the step chose; `accepted`: it was one of them."""

    id: int
    choice: int
    token: int
    ended: str
    logprobs: TokenLogprobs | None = None
    drafts: int = 0
    accepted: bool = False


class Complete(msgspec.Struct, frozen=True, tag=True):
    """A choice that was to be resumed is complete with what it has: `ended` as a `Token` says it. It may come before
    the request is started, which never is where all choices were complete."""

    id: int
    choice: int
    ended: str


class PromptLogprobs(msgspec.Struct, frozen=True, tag=True):
    """How likely tokens of a request's prompt were, from token `first` on. All of them come before its first token."""

    id: int
    first: int
    logprobs: list[TokenLogprobs]


class Pooled(msgspec.Struct, frozen=True, tag=True):
    """What a request's pooling makes of the hidden states of its prompt, float32 [hidden]; with that it is over."""

    id: int
    values: bytes


class Prefilled(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`count` tokens of one choice, from token `first` on, were computed by one step, between `began` and `ended` of
    `time.perf_counter`, which all processes of a host share."""

    id: int
    choice: int
    first: int
    count: int
    began: float
    ended: float


class Prefills(msgspec.Struct, frozen=True, tag=True):
    """What one step computed of prompts. It comes before the step's tokens."""

    chunks: list[Prefilled]


class Tokens(msgspec.Struct, frozen=True, tag=True):
    """What one step produced, which had it at a time of `time.perf_counter`."""

    tokens: list[Token]
    at: float


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A request ended without success; `code` is a google.rpc.Code number, `field` what of the request is at fault,
    where it is one value."""

    id: int
    code: int
    reason: str
    message: str
    field: str = ""


class Released(msgspec.Struct, frozen=True, tag=True):
    """These requests are gone: nothing that they held outside the engine is read any more."""

    ids: list[int]


class Counters(msgspec.Struct):
    """Totals since start, by their names in the contract's GetLoad."""

    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    graph_steps: int = 0
    prefix_query_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


class State(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Queues as of now, and what was counted. `running_adapters` and `waiting_adapters` are the numbers of
    those that choices run or wait with."""

    waiting: int = 0
    running: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    kv_blocks_cached: int = 0
    kv_host_blocks_total: int = 0
    kv_host_blocks_used: int = 0
    kv_blocks_offloaded: int = 0
    kv_blocks_loaded: int = 0
    state_slots: int = 0
    state_slots_used: int = 0
    state_snapshots: int = 0
    counters: Counters = msgspec.field(default_factory=Counters)
    adapter_fills: int = 0
    running_adapters: list[int] = []
    waiting_adapters: list[int] = []


class Beat(msgspec.Struct, frozen=True, tag=True):
    """The engine process runs: sent every second, whatever it computes, so that a frozen one is noticed. `state` is
    read while it computes, each number at its own moment; `busy_seconds` is how long the step under way has taken.
    `compiling`: kernels are being compiled, and torch computes meanwhile. `late_compiles`: kernels that steps have had
    to wait for."""

    state: State
    busy_seconds: float = 0.0
    compiling: bool = False
    late_compiles: int = 0


class PullEnded(msgspec.Struct, frozen=True, tag=True):
    """What came of a `PullRows`: `end` is a `Pulled`."""

    id: int
    end: int


class AdapterRead(msgspec.Struct, frozen=True, tag=True):
    """What came of a `LoadAdapter`: every rank has it, or `error` says why none does. A `passing` one is none of the
    adapter's: there was no thread, or no memory, to read it."""

    id: int
    digest: bytes = b""
    rank: int = 0
    error: str = ""
    passing: bool = False


class Medium(StrEnum):
    """Where blocks are, in vLLM's words: GPU is whatever steps compute from."""

    DEVICE = "GPU"
    HOST = "CPU"


class BlocksStored(msgspec.Struct, tag=True):
    """Blocks that can be found from now on, each the next one's parent, by the last 64 bits of their identities; their
    tokens, int32, and what they depend on beside these. `parent` is the first one's, None at the beginning of a prompt;
    `adapter` is a number, 0 for none."""

    parent: int | None
    medium: Medium
    adapter: int = 0
    hashes: list[int] = []
    token_ids: list[bytes] = []
    keys: list[list[str]] = []


class BlocksRemoved(msgspec.Struct, tag=True):
    """Blocks that cannot be found there any more."""

    medium: Medium
    hashes: list[int] = []


class BlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """Nothing can be found any more, anywhere."""


BlockEvent = BlocksStored | BlocksRemoved | BlocksCleared


class BlocksChanged(msgspec.Struct, frozen=True, tag=True):
    """What became of blocks that prompts can find, in order; it comes before the tokens of the step that did it."""

    events: list[BlockEvent]


class BlocksAnswer(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What the front has asked about blocks: how many are cached (`found`), or the host's `places` of them."""

    id: int
    found: int = 0
    places: list[int] = []


class Flushed(msgspec.Struct, frozen=True, tag=True):
    """How many blocks were forgotten."""

    blocks: int


FromEngine = (
    Ready
    | Unable
    | Defect
    | Started
    | RowsRead
    | RowsNeeded
    | Prefills
    | PromptLogprobs
    | Pooled
    | Tokens
    | Complete
    | Failed
    | Released
    | Beat
    | PullEnded
    | AdapterRead
    | BlocksChanged
    | BlocksAnswer
    | Flushed
    | State
)
