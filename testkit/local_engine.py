"""The LLM engine in one process, on rows that the reference made: what it computes, without wires in between."""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import structs
from PIL import Image

from common.checkpoints.checkpoint import Checkpoint
from common.hf.classes import config_of
from common.hf.description import HfModel
from common.media import kept_rows
from common.media.item import Grid, Header, Key, Modality
from common.shm.arena import SharedBuffer
from llm_service.engine.batch import Step
from llm_service.engine.block_manager import BlockManager
from llm_service.engine.limits import SchedulerLimits
from llm_service.engine.matchers import Form, Matcher
from llm_service.engine.messages import NOWHERE, Add, Complete, Failed, ItemRows, Started, Token
from llm_service.engine.notices import StepOutput
from llm_service.engine.planner import Drafter
from llm_service.engine.scheduler import Scheduler
from llm_service.engine.sequence import Sequence as Sequenced
from llm_service.layers.attention.backend import AttentionBackend, CacheShape
from llm_service.layers.lora.linear_adapters import AdapterKernel
from llm_service.layers.mixer import CachedPart, StateBackend
from llm_service.model_config.adapter_folder import Adapter, read
from llm_service.model_config.served import ServedModel
from llm_service.models.decoder import Decoder
from llm_service.models.hf.decoder import HfDecoder
from llm_service.models.hf.loader import load_hf_decoder
from llm_service.models.loader import TextSide, load_decoder
from llm_service.models.trial import Finding
from llm_service.plan import StepMemoryError, TokenLogprobs
from llm_service.prompt.builder import PromptBuilder
from llm_service.request import ChatPrompt, MediaItem, Message, Pooling, PromptLayout, SamplingParams
from llm_service.settings import CacheDtype
from llm_service.worker.adapters import RankAdapters, adaptable_of
from llm_service.worker.caches import Caches
from llm_service.worker.draft_loader import Drafting, load_draft_model, load_eagle_head, load_mtp_layer
from llm_service.worker.executor import LoneExecutor
from llm_service.worker.hf_adapters import HfAdapters, hf_adaptable
from llm_service.worker.host_cache import HostCache
from llm_service.worker.loaded_adapters import LoadedAdapters
from llm_service.worker.messages import AddAdapter
from llm_service.worker.model_runner import Launched, ModelRunner
from llm_service.worker.row_arena import RowArena
from testkit import reference

Part = str | Image.Image | reference.Video


@dataclass(slots=True)
class Prompt:
    """A laid-out prompt and the rows [tokens, levels, width] of its items; `inputs` is what the reference takes."""

    layout: PromptLayout
    rows: list[torch.Tensor]
    inputs: dict[str, torch.Tensor]
    salt: str = ""


@dataclass(slots=True)
class Outcome:
    """What came of a request."""

    tokens: list[int] = field(default_factory=list)
    cached: int = -1
    ended: str = ""
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt: list[TokenLogprobs] = field(default_factory=list)
    pooled: bytes = b""


@dataclass(slots=True)
class Progress:
    """Which requests a step started, what came of those that were finished, and of requests meanwhile."""

    started: Sequence[Started]
    outputs: list[StepOutput] = field(default_factory=list)
    complete: list[Complete] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)

    @property
    def tokens(self) -> list[Token]:
        """Of all steps."""
        return [token for output in self.outputs for token in output.tokens]


def make_prompt(
    directory: Path,
    parts: Sequence[Part],
    builder: PromptBuilder | None = None,
    *,
    prune: Callable[[Header, torch.Tensor], np.ndarray] | None = None,
) -> Prompt:
    """One user message with these parts, laid out by us, with rows and inputs from the reference. Of a video, those
    rows are kept that `prune` says of its header and rows, [tokens] of bool; the inputs have all."""
    builder = builder or PromptBuilder(Checkpoint(directory))
    images = [part for part in parts if isinstance(part, Image.Image)]
    videos = [part for part in parts if isinstance(part, reference.Video)]
    content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": _kind(p)} for p in parts]
    inputs = reference.reference_inputs(directory, [{"role": "user", "content": content}], images, videos)
    headers: list[Header] = []
    rows: list[torch.Tensor] = []
    for part in parts:
        if isinstance(part, str):
            continue
        header, block = _image(directory, part) if isinstance(part, Image.Image) else _video(directory, part)
        if prune is not None and header.modality is Modality.VIDEO:
            mask = prune(header, block)
            bits = kept_rows.pack(mask)
            header = dataclasses.replace(header, tokens=int(mask.sum()), grid_rows=len(mask), kept_rows=bits)
            block = block[torch.from_numpy(mask)].contiguous()
        headers.append(header)
        rows.append(block)
    items = iter(MediaItem(header.modality, Key(b""), index=n) for n, header in enumerate(headers))
    message = Message("user", tuple(part if isinstance(part, str) else next(items) for part in parts))
    pieces = builder.pieces(ChatPrompt((message,)), [header.modality for header in headers])
    return Prompt(builder.layout(pieces, headers), rows, inputs)


def _kind(part: Part) -> str:
    return "image" if isinstance(part, Image.Image) else "video"


def _image(directory: Path, image: Image.Image) -> tuple[Header, torch.Tensor]:
    patches, grids = reference.images_inputs(directory, [image])
    return _header(Modality.IMAGE, patches, grids, reference.rows(directory, patches, grids))


def _video(directory: Path, video: reference.Video) -> tuple[Header, torch.Tensor]:
    patches, grids, metadata = reference.video_inputs(directory, video)
    indices = [int(index) for index in metadata.frames_indices]
    indices += indices[-1:] * (len(indices) % 2)
    times = [index / metadata.fps for index in indices]
    header, rows = _header(Modality.VIDEO, patches, grids, reference.rows(directory, patches, grids))
    middles = tuple((first + second) / 2 for first, second in zip(times[::2], times[1::2], strict=True))
    seconds = 2 / metadata.sampled_fps
    return dataclasses.replace(header, timestamps=middles, seconds_per_grid=seconds), rows


def _header(
    modality: Modality, patches: torch.Tensor, grids: torch.Tensor, rows: torch.Tensor
) -> tuple[Header, torch.Tensor]:
    key = hashlib.sha256(patches.numpy().tobytes() + grids.numpy().tobytes()).digest()
    return Header(key, modality, Grid(*grids[0].tolist()), len(rows)), rows.contiguous()


def misled_drafts(expected: Sequence[Sequence[int]]) -> Drafter:
    """Drafts of what is expected of each request, in order, of which now and then one is wrong."""

    def foreseen(sequence: Sequenced, count: int) -> array[int]:
        drafts = array("i", expected[sequence.id - 1][sequence.generated :][:count])
        wrong = sequence.generated % (2 * count)
        if wrong < len(drafts):
            drafts[wrong] ^= 1
        return drafts

    return foreseen


class LocalEngine:
    """Scheduler and runner over one checkpoint; `run` serves prompts together until all have ended."""

    def __init__(
        self,
        directory: Path,
        *,
        step_tokens: int = 4096,
        blocks: int = 512,
        block_size: int = 16,
        max_running: int = 16,
        prefix_cache: bool = False,
        device: str = "cpu",
        attention: str | Callable[[CacheShape], AttentionBackend] = "auto",
        states: Callable[[CachedPart], StateBackend] = methodcaller("state_backend"),
        overlap: bool = False,
        keep_media_whole: bool = False,
        weight_dtype: str = "",
        dtype: torch.dtype = torch.float32,
        hf: HfModel | None = None,
        text: TextSide | None = None,
        finding: Finding | None = None,
        speculative_tokens: int = 0,
        draft: Drafter | None = None,
        adapters: Sequence[Path] = (),
        max_loras: int = 0,
        adapter_kernel: AdapterKernel | None = None,
        draft_model: Path | None = None,
        mtp: bool = False,
        eagle: Path | None = None,
        kv_cache_dtype: CacheDtype = CacheDtype.AUTO,
        host_blocks: int = 0,
        eos: frozenset[int] = frozenset(),
        match: Callable[[Form, Sequence[int]], Future[Matcher]] | None = None,
        **limits: Any,
    ) -> None:
        checkpoint = Checkpoint(directory)
        served = ServedModel.of(checkpoint) if hf is None else ServedModel.by_hf(hf)
        decoder: Decoder | HfDecoder
        if hf is None or text is not None:
            given: dict[str, Any] = {"weight_dtype": weight_dtype, "text": text}
            given |= {"cache_scales": kv_cache_dtype is CacheDtype.FP8}
            decoder = load_decoder(checkpoint, dtype, torch.device(device), **given)
        else:
            own: dict[str, Any] = {"finding": finding, "weight_dtype": weight_dtype, "attention": attention}
            decoder = load_hf_decoder(checkpoint, hf, dtype, torch.device(device), **own)
            attention = decoder.backend
        self.decoder = decoder
        self._buffer = SharedBuffer.create("test-rows", 64 << 20)
        arena = RowArena(self._buffer.view, served.levels, served.hidden_size, torch.float32)
        self._memory = torch.frombuffer(self._buffer.view, dtype=torch.uint8)
        made = decoder.mixers(), blocks, block_size, decoder.kv_dtype, decoder.device
        caches = Caches(
            *made,
            attention=attention,
            states=states,
            state_slots=max_running,
            snapshot_slots=32,
            kv_cache_dtype=kv_cache_dtype,
        )
        drafting: Drafting | None = None
        if draft_model is not None:
            drafting = load_draft_model(Checkpoint(draft_model), served, dtype, torch.device(device))
        if mtp:
            drafting = load_mtp_layer(checkpoint, decoder, dtype, weight_dtype=weight_dtype)
        if eagle is not None:
            drafting = load_eagle_head(Checkpoint(eagle), decoder, checkpoint, dtype, weight_dtype=weight_dtype)
        proposer = None if drafting is None else drafting.proposer(arena, blocks, block_size, attention)
        drafts_blocks = [] if proposer is None else proposer.caches.block_tensors
        read_adapters: list[Adapter] = []
        slots: LoadedAdapters | None = None
        if adapters:
            adaptable = adaptable_of(checkpoint.config if hf is None else hf.text, max_rank=8)
            assert isinstance(decoder, Decoder)
            slots = RankAdapters(decoder, max_loras or len(adapters), 8, adapter_kernel)
            read_adapters = [read(str(folder.parent), folder.name, adaptable) for folder in adapters]
        if hf is not None and hf.adapters:
            paths = list(dict.fromkeys(hf.adapters.values()))
            if isinstance(decoder, HfDecoder):
                slots = HfAdapters(decoder, len(paths))
                adaptable = hf_adaptable(config_of(directory), max_rank=8)
            else:
                slots = RankAdapters(decoder, len(paths), 8, adapter_kernel)
                adaptable = adaptable_of(hf.text, max_rank=8)
            read_adapters = [read(str(directory), path, adaptable) for path in paths]
        self.runner = ModelRunner(
            decoder,
            arena,
            caches,
            adapters=slots,
            host_cache=HostCache([*caches.block_tensors, *drafts_blocks], host_blocks) if host_blocks else None,
            proposer=proposer,
            keeps_hidden=mtp or eagle is not None,
        )
        self._executor = LoneExecutor(self.runner)
        self.adapters = dict(enumerate(read_adapters, 1))
        for number, adapter in self.adapters.items():
            self.runner.adapt(AddAdapter(number, adapter))
        self.scheduler = Scheduler(
            BlockManager(
                blocks,
                block_size,
                prefix_cache=prefix_cache,
                state_slots=caches.state_slots + caches.snapshot_slots,
                state_chunk=caches.state_chunk,
                host_blocks=host_blocks,
            ),
            SchedulerLimits(
                max_running,
                step_tokens,
                blocks * block_size,
                keep_media_whole,
                chunk_rule=self.runner.chunk_rule,
                forgets_answers=self.runner.forgets_answers,
                speculative_tokens=speculative_tokens,
                max_loras=max_loras or len(self.adapters),
                proposes=self.runner.proposer is not None,
                **limits,
            ),
            eos,
            arena.row_bytes,
            match,
            draft=draft,
        )
        self._depth = 2 if overlap else 1
        self._under_way: deque[tuple[Step, Launched]] = deque()
        self._arena = arena
        self._free = 0
        self._places: dict[bytes, int] = {}
        self._rows: dict[int, list[tuple[int, int]]] = {}
        self._rows_needed: list[int] = []
        self._ids = 0

    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        adapter: int = 0,
        pooling: Pooling | None = None,
        *,
        late: bool = False,
        unplaced: bool = False,
        **more: Any,
    ) -> int:
        """Puts a prompt's rows into the arena and its request into the scheduler; its id. Adapters are numbered from 1
        on. `late`: the caller says when rows land. `unplaced`: they have no place until the cache is found not to have
        them. `more` is as `Add` has it."""
        items = []
        for span in prompt.layout.spans:
            offset = self._land(span.header.key, prompt.rows[span.item])
            items.append(ItemRows(span.header.key, offset, span.runs, span.header.tokens))
        self._ids += 1
        self._rows[self._ids] = [(item.offset, item.landed) for item in items]
        if late or unplaced:
            items = [structs.replace(item, landed=0) for item in items]
        if unplaced:
            items = [structs.replace(item, offset=NOWHERE) for item in items]
        request = Add(
            id=self._ids,
            token_ids=array("i", prompt.layout.ids).tobytes(),
            positions=prompt.layout.positions,
            mrope_delta=prompt.layout.mrope_delta,
            items=items,
            sampling=sampling,
            salt=prompt.salt,
            priority=0,
            deadline=None,
            adapter=adapter,
            adapter_digest=self.adapters[adapter].digest if adapter else b"",
            max_length=prompt.layout.max_length,
            pooling=pooling,
        )
        self.scheduler.add(structs.replace(request, **more))
        return self._ids

    def _land(self, key: bytes, rows: torch.Tensor) -> int:
        if key not in self._places:
            data = rows.reshape(-1).view(torch.uint8)
            self._places[key], self._free = self._free, self._free + len(data)
            self._memory[self._places[key] : self._free] = data
        return self._places[key]

    def run(self, prompts: Sequence[Prompt], sampling: SamplingParams, adapters: Sequence[int] = ()) -> list[Outcome]:
        """Serves all prompts at once; their outcomes in order (of the first choice where there are several)."""
        each = zip(prompts, adapters or [0] * len(prompts), strict=True)
        return self._serve({self.submit(prompt, sampling, adapter): Outcome() for prompt, adapter in each})

    def embed(
        self,
        prompts: Sequence[Prompt],
        pooling: Pooling = Pooling.LAST,
        beside: Sequence[Prompt] = (),
        adapters: Sequence[int] = (),
    ) -> Any:
        """What is pooled of all prompts at once, float32 [prompts, hidden], and how many tokens of each were cached;
        others are answered beside them."""
        nothing = SamplingParams(max_tokens=1, temperature=0.0)
        some = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        each = zip(prompts, adapters or [0] * len(prompts), strict=True)
        outcomes = {self.submit(prompt, nothing, adapter, pooling): Outcome() for prompt, adapter in each}
        found = self._serve(outcomes | {self.submit(prompt, some): Outcome() for prompt in beside})[: len(prompts)]
        vectors = np.stack([np.frombuffer(outcome.pooled, np.float32) for outcome in found])
        return vectors, [outcome.cached for outcome in found]

    def advance(self) -> Progress | None:
        """Launches the next step and finishes the oldest, where there are as many under way as may be, or no other;
        None where there is nothing to do."""
        step, started = self.scheduler.schedule()
        progress = Progress(started)
        if step is not None:
            planned = step

            def masks() -> list[bytes]:
                while self._under_way:  # what a mask depends on
                    progress.outputs.append(self._finish())
                return self.scheduler.masks(planned)

            try:
                launched = self._executor.launch(step.plan, masks)
            except StepMemoryError:
                while self._under_way:
                    progress.outputs.append(self._finish())
                assert self.scheduler.abandon([step])
                return self._heard(progress)
            self._under_way.append((step, launched))
            if len(self._under_way) < self._depth:
                return self._heard(progress)
        if self._under_way:
            progress.outputs.append(self._finish())
            return self._heard(progress)
        self._heard(progress)
        return progress if self._place_rows() or progress.complete or progress.failed else None

    def _heard(self, progress: Progress) -> Progress:
        notices = self.scheduler.take_notices()
        progress.complete += notices.complete
        progress.failed += notices.failed
        self._rows_needed += [each.id for each in notices.rows_needed]
        return progress

    def _finish(self) -> StepOutput:
        step, launched = self._under_way.popleft()
        return self.scheduler.finish(step, launched.result())

    def _serve(self, outcomes: dict[int, Outcome]) -> list[Outcome]:
        while (progress := self.advance()) is not None:
            for event in progress.started:
                outcomes[event.id].cached = event.cached
            self._tell(outcomes, progress)
        assert all(outcome.ended for outcome in outcomes.values()), "the engine has work but plans nothing"
        self.scheduler.check_integrity()
        return list(outcomes.values())

    def _place_rows(self) -> bool:
        """Says where rows are of requests that ask for them again; whether there are any."""
        needed, self._rows_needed = self._rows_needed, []
        for id in needed:
            self.scheduler.placed(id, self._rows[id])
        return bool(needed)

    def _tell(self, outcomes: dict[int, Outcome], progress: Progress) -> None:
        for output in progress.outputs:
            for scored in output.prompt_logprobs:
                self.scheduler.prompt_logprobs_taken(scored.id, scored.first + len(scored.logprobs))
                outcomes[scored.id].prompt.extend(scored.logprobs)
            for pooled in output.pooled:
                outcomes[pooled.id].pooled, outcomes[pooled.id].ended = pooled.values, "embedded"
        for token in progress.tokens:
            if token.choice == 0:
                outcomes[token.id].tokens.append(token.token)
                outcomes[token.id].ended = token.ended
                outcomes[token.id].logprobs.append(token.logprobs)
