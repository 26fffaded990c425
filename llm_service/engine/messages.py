"""Messages between the front and the engine process. Request ids are numbers that the front assigns."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from llm_service.model_config.served import Weights
from llm_service.plan import TokenLogprobs
from llm_service.request import MediaRun, Pooling, SamplingParams
from llm_service.settings import EngineSettings
from llm_service.worker.messages import InvalidateRows, PullRows, UnmapPool

NOWHERE = -1
"""The offset of an item that has no place in the arena: the prefix cache is expected to cover it."""


class ItemRows(msgspec.Struct, array_like=True):
    """An item of a prompt. Front and engine each keep up with where its rows are."""

    key: bytes
    """Its `Header.rows_key`."""
    offset: int
    """Offset of its rows in the row arena, in bytes; or NOWHERE."""
    runs: tuple[MediaRun, ...]
    landed: int
    """Number of rows that have arrived, from the first on."""

    def land(self, rows: int) -> None:
        """The first `rows` rows have arrived; of an item without a place this means nothing."""
        if self.offset != NOWHERE:
            self.landed = max(self.landed, rows)

    def place(self, offset: int, rows: int) -> None:
        """Gives the item a place in the arena, where `rows` rows have arrived."""
        self.offset, self.landed = offset, rows

    def displace(self) -> None:
        """The item has no place any more."""
        self.offset, self.landed = NOWHERE, 0


class Resumed(msgspec.Struct, frozen=True, array_like=True):
    """What a choice has generated already: its output, int32 [m]. If `finished`, no more is generated."""

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
    """Choices that continue from earlier output; at least one is not finished."""
    with_logprobs: int = 0
    """Tokens of the prompt, from the first on, that have their logprobs already."""
    adapter: int = 0
    """The number of one that is loaded, 0 for none."""
    adapter_digest: bytes = b""
    max_length: int = 0
    """Most tokens of each sequence; 0: the whole context."""
    pooling: Pooling | None = None
    """The request ends when its prompt is computed, with `Pooled` instead of tokens."""
    identities: bytes = b""
    """Concatenated identities of the prompt's first full blocks, as far as they were computed."""


class Landed(msgspec.Struct, frozen=True, tag=True):
    """The first `rows` rows of an item have landed."""

    id: int
    item: int
    rows: int


class RowsPlaced(msgspec.Struct, frozen=True, tag=True):
    """The answer to `RowsNeeded`: each item of the request has a place, as (offset, rows that have arrived there)."""

    id: int
    places: list[tuple[int, int]]


class PromptLogprobsTaken(msgspec.Struct, frozen=True, tag=True):
    """The client has read the request's prompt logprobs up to position `before`, exclusive."""

    id: int
    before: int


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Ends a request, or one choice of it (-1: all); nothing more is sent about it."""

    id: int
    choice: int = -1


class EndSessions(msgspec.Struct, frozen=True, tag=True):
    """Ends sessions: blocks kept for them are evicted like others."""

    sessions: list[int]


class Flush(msgspec.Struct, frozen=True, tag=True):
    """Forget cached blocks that no request uses."""


class FindBlocks(msgspec.Struct, frozen=True, tag=True):
    """Asks how many of these blocks are cached, from the first one on. This message and the next ones are answered by a
    `BlocksAnswer` with the same `id`."""

    id: int
    identities: list[bytes]


class LendBlocks(msgspec.Struct, frozen=True, tag=True):
    """Asks to keep these blocks, up to the first that is not cached, readable for the front in host memory until
    `BlocksRead`."""

    id: int
    identities: list[bytes]


class BlocksRead(msgspec.Struct, frozen=True, tag=True):
    """The front has finished reading the blocks lent to this exchange."""

    id: int


class AwaitBlocks(msgspec.Struct, frozen=True, tag=True):
    """Asks to reserve places in host memory for these blocks, or as many as there is room for. The front writes there
    until `BlocksArrived`."""

    id: int
    identities: list[bytes]


class BlocksArrived(msgspec.Struct, frozen=True, tag=True):
    """The first `count` of the awaited blocks are written; no more will come."""

    id: int
    count: int


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Asks to read the adapter in a folder, relative to the allowed one, and to keep it under a number that is not
    reused. If `digest` is not empty, the adapter must still have it."""

    id: int
    path: str
    digest: bytes = b""


class DropAdapter(msgspec.Struct, frozen=True, tag=True):
    """Drops an adapter: all of its requests have ended."""

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
    """Whether prompts reuse the computed blocks of earlier ones."""
    devices: list[str]
    """The ranks'."""
    reachable: list[str] = []
    """UUIDs of the devices whose memory every rank can read, for mirrors of the row arena."""
    weights: Weights = Weights()
    """Of rank 0."""
    waits: int = 0
    """How often a step of one token synchronises with the GPU without need."""
    place_bytes: int = 0
    """Bytes of a block in a rank's host memory; 0 if the front cannot read that memory."""


class Unable(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot serve the model as configured; `why` is for the operator."""

    why: str


class Defect(msgspec.Struct, frozen=True, tag=True):
    """The engine ends by an error of its own; `what` names it, and where, for the operator."""

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
    """All choices of these requests have computed their media positions: no step reads their rows again, unless
    `RowsNeeded` asks for them."""

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
    """A resumed choice is complete already; `ended` as in `Token`. May precede `Started`, which never comes if all
    choices were complete."""

    id: int
    choice: int
    ended: str


class PromptLogprobs(msgspec.Struct, frozen=True, tag=True):
    """How likely tokens of a request's prompt were, from token `first` on. All of them come before its first token."""

    id: int
    first: int
    logprobs: list[TokenLogprobs]


class Pooled(msgspec.Struct, frozen=True, tag=True):
    """The pooled hidden states of a request's prompt, float32 [hidden]; the request is over."""

    id: int
    values: bytes


class Prefilled(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One step has computed `count` prompt tokens of one choice, from position `first` on, between `began` and `ended`
    (`time.perf_counter`, which all processes of a host share)."""

    id: int
    choice: int
    first: int
    count: int
    began: float
    ended: float


class Prefills(msgspec.Struct, frozen=True, tag=True):
    """The prompt tokens computed by one step. Precedes the step's tokens."""

    chunks: list[Prefilled]


class Tokens(msgspec.Struct, frozen=True, tag=True):
    """The tokens of one step, and when they were known (`time.perf_counter`)."""

    tokens: list[Token]
    at: float


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A request failed. `code` is a google.rpc.Code number; `field` names the field of the request at fault, if there
    is one."""

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
    """The current queues, and counters. `running_adapters` and `waiting_adapters` are the adapter numbers of running
    and waiting choices."""

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
    """A sign of life that the engine process sends every second, whatever it computes, so that a frozen one is noticed.
    `state` is read during computation, each number at its own moment; `busy_seconds` is the age of the current step.
    `compiling`: kernels are being compiled, and torch computes meanwhile. `late_compiles`: kernels that steps had to
    wait for."""

    state: State
    busy_seconds: float = 0.0
    compiling: bool = False
    late_compiles: int = 0


class PullEnded(msgspec.Struct, frozen=True, tag=True):
    """The result of a `PullRows`; `end` is a `Pulled`."""

    id: int
    end: int


class AdapterRead(msgspec.Struct, frozen=True, tag=True):
    """The result of a `LoadAdapter`: all ranks have it, or `error` says why not. If `passing`, the adapter is not at
    fault: there was no thread or memory to read it."""

    id: int
    digest: bytes = b""
    rank: int = 0
    error: str = ""
    passing: bool = False


class Medium(StrEnum):
    """Where blocks are, as vLLM calls it: GPU is the memory that steps compute from."""

    DEVICE = "GPU"
    HOST = "CPU"


class BlocksStored(msgspec.Struct, tag=True):
    """Blocks that can be found from now on, each the parent of the next, by the last 64 bits of their identities, with
    their int32 tokens and what else identifies them. `parent` is the first block's parent, None at the start of a
    prompt; `adapter` is a number, 0 for none."""

    parent: int | None
    medium: Medium
    adapter: int = 0
    hashes: list[int] = []
    token_ids: list[bytes] = []
    keys: list[list[str]] = []


class BlocksRemoved(msgspec.Struct, tag=True):
    """Blocks that can no longer be found there."""

    medium: Medium
    hashes: list[int] = []


class BlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """Nothing can be found any more, anywhere."""


BlockEvent = BlocksStored | BlocksRemoved | BlocksCleared


class BlocksChanged(msgspec.Struct, frozen=True, tag=True):
    """Changes of the blocks that prompts can find, in order; precedes the tokens of the step that made them."""

    events: list[BlockEvent]


class BlocksAnswer(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The answer about blocks: how many are cached (`found`), or their `places` in host memory."""

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
