"""An engine without a model: `python -m testkit.light.engine SOCKET_FD ROW_ARENA_FD`. The loop, the scheduler, the
blocks and the grammars are the real ones; `Hashes` computes."""

from __future__ import annotations

import hashlib
import json
import time
from array import array
from functools import partial

import numpy as np

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.rows.wire import DType
from common.shm.arena import SharedBuffer
from llm_service.engine.core import ReadAdapter
from llm_service.engine.process import Loaded, serve
from llm_service.model_config.adapter_folder import Adaptable, read, stem_of
from llm_service.model_config.text import TextConfig
from llm_service.plan import Draw, StepPlan, StepResult, TokenLogprobs
from llm_service.settings import EngineSettings
from llm_service.worker.block_tables import BlockTables
from testkit.in_turn import InTurn
from testkit.light.slow import SLOW, SLOW_SECONDS

STEP_SECONDS = 0.001
"""A step sleeps as long as that: an answer of a thousand tokens takes a second, as from a small model."""


def load(settings: EngineSettings, arena_fd: int, step_seconds: float = STEP_SECONDS) -> Loaded:
    """A cache of as many blocks as the model would have; a step sleeps as long as is said."""
    if settings.device != "cpu" or settings.tensor_parallel != 1 or settings.row_mirror:
        raise CheckpointError("a light engine is one rank on a CPU")
    checkpoint = Checkpoint.resolve(settings.model)
    config = TextConfig.of(checkpoint.config)
    itemsize = DType(settings.dtype).itemsize
    block_bytes = 2 * config.layers * settings.block_size * config.kv_heads * config.head_dim * itemsize
    context = config.max_context(settings.max_context)
    wanted = settings.max_running * -(-context // settings.block_size)
    blocks = settings.kv_cache_bytes // block_bytes if settings.kv_cache_bytes else wanted
    if not blocks:
        raise CheckpointError(
            f"--kv-cache-bytes is too small for this model: one KV block takes {block_bytes} bytes",
        )
    row_bytes = settings.row_levels * config.hidden_size * itemsize
    arena = SharedBuffer.attach(arena_fd, settings.row_arena_bytes)
    sizes = row_bytes, settings.block_size, config.vocab_size, config.hidden_size
    host_blocks = settings.kv_host_bytes // block_bytes
    shared = settings.kv_host_fd > 0
    own = memoryview(bytearray(host_blocks * block_bytes))
    host = SharedBuffer.attach(settings.kv_host_fd, settings.kv_host_bytes).view if shared else own
    executor = Hashes(arena, *sizes, _special(checkpoint), step_seconds, host)
    in_turn = InTurn(executor.run, executor.offload)
    executor.adapters = in_turn.adapters
    reader = adapter_reader(settings)
    return Loaded(
        in_turn,
        blocks,
        row_bytes,
        block_bytes=block_bytes,
        devices=["cpu"],
        reachable=[],
        read_adapter=reader,
        host_blocks=host_blocks,
        place_bytes=settings.block_size * array("q").itemsize if shared else 0,
    )


def adapter_reader(settings: EngineSettings) -> ReadAdapter | None:
    """The real one, for shapes that are the checkpoint's."""
    if not settings.max_loras:
        return None
    tensors = Checkpoint.resolve(settings.model).tensors.items()
    shapes = {stem_of(name.removesuffix(".weight")): info.shape for name, info in tensors if len(info.shape) == 2}
    adaptable = Adaptable(shapes, settings.max_lora_rank, settings.base_names)
    return partial(read, settings.lora_dir, adaptable=adaptable)


def _special(checkpoint: Checkpoint) -> list[int]:
    tokenizer = json.loads(checkpoint.text("tokenizer.json") or "{}")
    return [token["id"] for token in tokenizer.get("added_tokens", ()) if token["special"]]


class Hashes:
    """Runs plans on a KV cache of hashes: a slot holds one of everything up to its token."""

    def __init__(
        self,
        arena: SharedBuffer,
        row_bytes: int,
        block_size: int,
        vocabulary: int,
        hidden_size: int,
        special: list[int],
        step_seconds: float,
        host: memoryview,
    ) -> None:
        self._arena = arena
        self._host = host.cast("B")
        self._row_bytes = row_bytes
        self._block_size = block_size
        self._vocabulary = vocabulary
        self._hidden_size = hidden_size
        self._special = special
        self._step_seconds = step_seconds
        self._slots: dict[int, int] = {}
        self._adapter_slots: dict[int, int] = {}
        self.adapters: dict[int, bytes] = {}
        self._tables = BlockTables()

    def run(self, plan: StepPlan) -> StepResult:
        time.sleep(SLOW_SECONDS if any(SLOW in draw.logit_bias for draw in plan.draws) else self._step_seconds)
        states = self._states(plan)
        chosen = [self._choose(states[draw.at], draw) for draw in plan.draws]
        scores = [
            [
                _entry(_log_softmax(self._logits(states[asked.at + n])), target, asked.top)
                for n, target in enumerate(array("i", asked.targets))
            ]
            for asked in plan.prompt_logprobs
        ]
        pooled = [self._pool(states[asked.at : asked.at + asked.count]) for asked in plan.pools]
        tokens, logprobs = [token for token, _ in chosen], [entry for _, entry in chosen]
        return StepResult(tokens, logprobs, scores, pooled=pooled)

    def _states(self, plan: StepPlan) -> list[int]:
        """The hash at each place of the batch, which the cache then has as well."""
        self._copy(plan)
        tokens = np.frombuffer(plan.token_ids, np.int32).tolist()
        positions = np.frombuffer(plan.positions, np.int32).reshape(3, -1).T.tolist()
        rows = self._rows(plan)
        states: list[int] = []
        self._tables.append(plan.appended)
        self._adapter_slots |= {
            slot: int.from_bytes(self.adapters[number][:8]) for slot, number in plan.adapters.filled
        }
        for number, chunk in enumerate(plan.chunks):
            slot = plan.adapters.slots[number] if plan.adapters.slots else -1
            adapter = self._adapter_slots[slot] if slot >= 0 else 0
            blocks = self._tables.numbers[chunk.row].tolist()
            state = self._slots[self._slot(blocks, chunk.context - 1)] if chunk.context else 0
            for index in range(chunk.context, chunk.context + chunk.count):
                at = len(states)
                state = hash((state, tokens[at], *positions[at], rows.get(at, -1)) + ((adapter,) if adapter else ()))
                self._slots[self._slot(blocks, index)] = state
                states.append(state)
        return states

    def _copy(self, plan: StepPlan) -> None:
        """What goes to the host's memory before the step, and what comes back."""
        self.offload(plan.offloaded)
        size = self._block_size
        for place, block in plan.loaded:
            states = array("q", self._place(place).tobytes())
            self._slots |= {block * size + n: state for n, state in enumerate(states)}

    def offload(self, pairs: list[tuple[int, int]]) -> None:
        """Copies blocks, all of which are whole, to places of the host."""
        size = self._block_size
        for block, place in pairs:
            self._place(place)[:] = array("q", (self._slots[block * size + n] for n in range(size))).tobytes()

    def _place(self, place: int) -> memoryview:
        size = self._block_size * array("q").itemsize
        return self._host[place * size : (place + 1) * size]

    def _slot(self, blocks: list[int], index: int) -> int:
        return blocks[index // self._block_size] * self._block_size + index % self._block_size

    def _rows(self, plan: StepPlan) -> dict[int, int]:
        out: dict[int, int] = {}
        for piece in plan.rows:
            for n in range(piece.count):
                begin = piece.offset + n * self._row_bytes
                row = hashlib.blake2b(self._arena.view[begin : begin + self._row_bytes], digest_size=8)
                out[piece.at + n] = int.from_bytes(row.digest(), "little")
        return out

    def _logits(self, state: int) -> np.ndarray:
        """float64 [vocabulary]; special tokens are unlikely, so that answers are as long as was asked for."""
        draws = np.random.Generator(np.random.Philox(key=state % (1 << 64)))
        logits = 3.0 * draws.standard_normal(self._vocabulary)
        logits[self._special] -= 40.0
        return logits

    def _pool(self, states: list[int]) -> bytes:
        """float32 [hidden], the sum of what stands for hidden states."""
        found = np.zeros(self._hidden_size)
        for state in states:
            found += np.random.Generator(np.random.Philox(key=state % (1 << 64))).standard_normal(self._hidden_size)
        return found.astype(np.float32).tobytes()

    def _choose(self, state: int, draw: Draw) -> tuple[int, TokenLogprobs | None]:
        logits = self._logits(state)
        token = _token(logits.copy(), draw)
        asked = draw.logprobs >= 0
        return token, _entry(_log_softmax(logits), token, draw.logprobs) if asked else None


def _token(logits: np.ndarray, draw: Draw) -> int:
    """One token of an adjusted distribution, in the order of the real sampler: bias, penalties, bans, the grammar."""
    for token, bias in draw.logit_bias.items():
        logits[token] += bias
    output = np.bincount(np.frombuffer(draw.output, np.int32), minlength=len(logits))
    seen = output > 0
    seen[np.frombuffer(draw.prompt, np.int32)] = True
    factor = np.where(logits > 0, 1 / draw.repetition_penalty, draw.repetition_penalty)
    logits = np.where(seen, logits * factor, logits)
    logits -= draw.presence_penalty * (output > 0) + draw.frequency_penalty * output
    logits[list(draw.banned)] = -np.inf
    if draw.allowed_mask:
        bits = np.unpackbits(np.frombuffer(draw.allowed_mask, np.uint8), bitorder="little")[: len(logits)]
        logits[bits == 0] = -np.inf
    if draw.temperature == 0.0:
        return int(logits.argmax())
    order = np.argsort(-logits, kind="stable")
    chances = np.exp(_log_softmax(logits[order] / draw.temperature))
    keep = np.cumsum(chances) - chances < draw.top_p
    keep &= chances >= draw.min_p * chances[0]
    if draw.top_k:
        keep[draw.top_k :] = False
    sums = np.cumsum(np.where(keep, chances, 0.0))
    return int(order[np.searchsorted(sums, draw.uniform * sums[-1], side="right")])


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    out: np.ndarray = shifted - np.log(np.exp(shifted).sum())
    return out


def _entry(logprobs: np.ndarray, token: int, top: int) -> TokenLogprobs:
    likeliest = np.argsort(-logprobs, kind="stable")[:top].tolist()
    return TokenLogprobs.of(float(logprobs[token]), [(index, float(logprobs[index])) for index in likeliest])


if __name__ == "__main__":
    serve(load)
