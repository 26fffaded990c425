"""Loads a rank, from settings to a warm runner; the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.cpu.compiling import Compilation, not_kept
from common.gpu.device import use_gpu
from common.gpu.graphs import CudaCapture
from common.hardware import usable_cores
from common.hf.rows import longest_run
from common.process.core_share import CoreShare
from common.process.malloc import give_back
from common.shm.arena import SharedBuffer
from common.telemetry import log
from llm_service.layers.cpu import selection
from llm_service.layers.tensor_parallel import TensorGroup
from llm_service.model_config.served import ServedModel, Weights
from llm_service.models.decoder import Decoder
from llm_service.models.hf.decoder import HfDecoder
from llm_service.models.hf.loader import load_hf_decoder
from llm_service.models.known_text import known_text
from llm_service.models.loader import TextSide, load_decoder
from llm_service.models.model import Model
from llm_service.models.quantization_config import quantization_of
from llm_service.plan import StepPlan
from llm_service.settings import DRAFT_HEADS, CacheDtype, EngineSettings
from llm_service.worker.cache_dtype import with_cache_dtype
from llm_service.worker.cache_room import CacheRoom, cache_room
from llm_service.worker.caches import Caches
from llm_service.worker.changeover import Changeover
from llm_service.worker.draft_loader import Drafting, load_draft_model, load_eagle_head, load_mtp_layer
from llm_service.worker.draft_model import DraftModel
from llm_service.worker.dummy_plans import largest_step, prompt_plan
from llm_service.worker.graphs import CaptureBounds
from llm_service.worker.host_cache import HostCache
from llm_service.worker.load_adapters import rank_adapters
from llm_service.worker.loaded_adapters import LoadedAdapters
from llm_service.worker.memory import Gauge, cache_budget
from llm_service.worker.mirror import row_mirror
from llm_service.worker.model_runner import ModelRunner
from llm_service.worker.row_arena import RowArena
from llm_service.worker.wait_trial import unmeant_waits
from llm_service.worker.weights import describe

_log = log.get("load")
_LACK = "DefaultCPUAllocator: can't allocate memory: "
"""How torch's message begins if memory is short."""
_USUAL_PROMPT = 512
"""Tokens of a typical prompt besides its picture's rows."""


@dataclass(frozen=True, slots=True)
class LoadedRank:
    """A warm runner, and what loading has found out."""

    runner: ModelRunner
    weights: Weights
    """This rank's partition of them."""
    max_step_tokens: int
    """Of the largest step that it has memory for."""
    block_bytes: int
    """Bytes of a KV block, including the proposer's."""
    waits: int
    """How often a decode step of one token synchronises with the GPU without need."""
    changeover: Changeover | None
    """The switch from torch's kernels to ours, while these are being compiled."""


def load_rank(settings: EngineSettings, device: torch.device, group: TensorGroup, arena_fd: int) -> LoadedRank:
    """Loads this rank's partition of the model, runs the largest step, and allocates the KV cache in the remaining
    memory.

    All ranks' caches have the same sizes. Raises CheckpointError if the checkpoint cannot be served, or not on this
    device.
    """
    if device.type == "cuda":
        use_gpu(device)
    try:
        return _load(settings, device, group, arena_fd)
    except torch.OutOfMemoryError as error:
        raise CheckpointError(f"the GPU's memory is too small: {str(error).partition(chr(10))[0]}") from error
    except RuntimeError as error:  # so torch says it of the host's
        if _LACK not in str(error):
            raise
        raise CheckpointError(f"this machine's memory is too small: {str(error).partition(_LACK)[2]}") from error


def _load(settings: EngineSettings, device: torch.device, group: TensorGroup, arena_fd: int) -> LoadedRank:
    here = group.size // settings.nodes
    use = _use_threads(settings, device, here)
    checkpoint = Checkpoint.resolve(settings.model)
    dtype: torch.dtype = getattr(torch, settings.dtype)
    memory = SharedBuffer.attach(arena_fd, settings.row_arena_bytes)
    if settings.symmetric_memory:
        from llm_service.layers.gpu.symmetric_sum import with_symmetric_memory

        group = with_symmetric_memory(group, dtype, device)
    if settings.expert_parallel:
        group = group.with_whole_experts()
    hf, text = settings.hf, None
    if hf is not None:
        text = known_text(checkpoint, hf, group, settings.max_context)
    decoder = _decoder(settings, checkpoint, dtype, device, group, text)
    settings = _with_larger_steps(settings, checkpoint, decoder)
    settings = with_cache_dtype(settings, checkpoint, decoder)
    give_back()
    adapters = rank_adapters(settings, decoder)
    all_of_it = decoder.weights()
    weights = describe(all_of_it, settings.weight_dtype or quantization_of(checkpoint.config))
    _log.info("weights are in memory", **msgspec.structs.asdict(weights))
    served = ServedModel.of(checkpoint, settings.hf)
    width = served.hidden_size
    drafting = _drafting(settings, served, decoder, text, dtype) if group.rank == 0 else None
    mirror = row_mirror(settings, device, width, dtype) if settings.row_mirror else None
    arena = RowArena(memory.view, settings.row_levels, width, dtype, mirror)
    if device.type == "cuda":
        arena.pin()
    loaded = _LoadedModel(settings, decoder, drafting, arena, group)
    group.all_reduce_min(0)  # every rank has its weights: free memory is stable from now on
    gauge = Gauge(device, here)
    changeover, graphs = _run_largest_step(loaded, adapters)
    context = served.max_context(settings.max_context)
    free = gauge.free() - graphs * settings.graph_bytes
    budget = cache_budget(settings, free, gpu=device.type == "cuda")
    room = cache_room(settings, decoder, drafting, group, budget, context)
    runner = loaded.runner(room, adapters, _core_share(loaded, use))
    if graphs:
        _capture(runner, settings, context, loaded)
    waits = len(unmeant_waits(runner)) if device.type == "cuda" else 0
    return LoadedRank(runner, weights, settings.max_step_tokens, room.block_bytes, waits, changeover)


def _use_threads(settings: EngineSettings, device: torch.device, here: int) -> Callable[[int], None]:
    """Sets this rank's threads, of several ranks on its host, and on a CPU whether torch or our kernels compute.
    Returns a function that changes the number later."""
    torch.set_num_threads(settings.threads or max(1, usable_cores() // here))
    if _uses_our_kernels(settings, device):
        from common.cpu.jit import use_threads  # numba takes its time

        use_threads(torch.get_num_threads())
        return use_threads
    if device.type == "cpu":
        selection.leave_to_torch()
    return torch.set_num_threads


def _uses_our_kernels(settings: EngineSettings, device: torch.device) -> bool:
    """Whether our CPU kernels are used."""
    return device.type == "cpu" and settings.kernels != "torch"


@dataclass(frozen=True, slots=True)
class _LoadedModel:
    """The model of a rank, once its partition of the weights is loaded."""

    settings: EngineSettings
    decoder: Model
    drafting: Drafting | None
    arena: RowArena
    group: TensorGroup

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.decoder.device

    def runner(
        self,
        room: CacheRoom,
        adapters: LoadedAdapters | None = None,
        core_share: CoreShare | None = None,
    ) -> ModelRunner:
        """One with so much room."""
        settings, decoder = self.settings, self.decoder
        caches = Caches(
            decoder.mixers(),
            room.blocks,
            settings.block_size,
            decoder.kv_dtype,
            decoder.device,
            kv_cache_dtype=settings.kv_cache_dtype,
            attention=decoder.attention(settings.attention),
            state_slots=room.slots,
            snapshot_slots=room.snapshots,
        )
        proposer: DraftModel | None = None
        if self.drafting is not None:
            proposer = self.drafting.proposer(self.arena, room.blocks, settings.block_size, settings.attention)
        return ModelRunner(
            decoder,
            self.arena,
            caches,
            adapters=adapters,
            host_cache=self._host_cache(room, caches, proposer) if room.host_blocks else None,
            proposer=proposer,
            keeps_hidden=settings.speculative_method in DRAFT_HEADS,
            core_share=core_share,
        )

    def _host_cache(self, room: CacheRoom, caches: Caches, proposer: DraftModel | None) -> HostCache:
        """Host places for the model's blocks and the proposer's: in this rank's part of the memory that the front has
        as well, if it has any."""
        tensors = [*caches.block_tensors, *(() if proposer is None else proposer.caches.block_tensors)]
        if not self.settings.kv_host_fd:
            return HostCache(tensors, room.host_blocks)
        size, rank = self.settings.kv_host_bytes, self.group.rank
        whole = SharedBuffer.attach(self.settings.kv_host_fd, self.settings.tensor_parallel * size)
        own = whole.view[rank * size : (rank + 1) * size]
        return HostCache(tensors, room.host_blocks, memory=own, place_bytes=room.place_bytes)


def _core_share(loaded: _LoadedModel, use: Callable[[int], None]) -> CoreShare | None:
    """This process's share of the host's cores, taken anew between layers; None if it has its cores to itself."""
    if not loaded.settings.core_share or loaded.device.type != "cpu" or loaded.group.size > 1:
        return None
    cores = CoreShare.of_this_host(torch.get_num_threads(), use)
    if cores is not None and loaded.decoder.layers:
        drafting = loaded.drafting
        cores.between([*loaded.decoder.layers, *(drafting.decoder.layers if drafting is not None else ())])
    return cores


def _run_largest_step(loaded: _LoadedModel, adapters: LoadedAdapters | None) -> tuple[Changeover | None, bool]:
    """Runs the largest step to measure its memory. Returns the changeover to our kernels, if any, and whether there can
    be graphs."""
    settings, device = loaded.settings, loaded.device
    # A CPU needs no measuring if the cache's size is given, which makes restarts faster.
    given = settings.kv_cache_bytes and device.type == "cpu"
    plan, blocks = _short_prompt_plan(settings) if given else largest_step(settings, loaded.arena.row_bytes)
    first, changeover = loaded.runner(CacheRoom(blocks, len(plan.chunks))), None
    if _uses_our_kernels(settings, device):
        names = sorted({*first.kernels(), *(adapters.kernels() if adapters is not None else ())})
        changeover = _choose_kernels(names, loaded.group, wait=settings.kernels == "wait")
    first.warm_up()
    if settings.compile and loaded.decoder.layers:
        _compile(loaded.decoder, loaded.group, device)
    first.run(prompt_plan(1, settings.block_size)[0])  # few rows, and to torch's compiler one, are a case of their own
    first.run(plan)
    return changeover, device.type == "cuda" and settings.graphs != "off" and _capturable(first, loaded.group)


def _capture(runner: ModelRunner, settings: EngineSettings, context: int, loaded: _LoadedModel) -> None:
    """Captures graphs of steps up to a context, and those of a draft model."""
    bounds = CaptureBounds(
        settings.max_running,
        settings.max_step_tokens,
        min(context, runner.caches.blocks * settings.block_size),
        settings.row_levels,
        settings.speculative_tokens,
        settings.draft_rows,
    )
    capture = CudaCapture(loaded.device)
    runner.capture(bounds, capture, max_bytes=settings.graph_bytes, agree=loaded.group.all_reduce_min)
    if runner.proposer is not None:
        runner.proposer.capture(bounds, capture, max_bytes=settings.graph_bytes)


def _decoder(
    settings: EngineSettings,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    group: TensorGroup,
    text: TextSide | None = None,
) -> Decoder | HfDecoder:
    """Our decoder, for a known `text` or a family; or transformers', which lacks some features."""
    if settings.hf is None or text is not None:
        scaled = settings.kv_cache_dtype is CacheDtype.FP8
        own: dict[str, Any] = {"weight_dtype": settings.weight_dtype, "text": text, "cache_scales": scaled}
        return load_decoder(checkpoint, dtype, device, group, **own)
    if settings.compile:
        raise CheckpointError("--compile is not for a model that transformers computes")
    if group.expert_parallel:
        raise CheckpointError("--enable-expert-parallel is not for a model that transformers computes")
    own = {"weight_dtype": settings.weight_dtype, "attention": settings.attention}
    return load_hf_decoder(checkpoint, settings.hf, dtype, device, group, **own)


def _with_larger_steps(settings: EngineSettings, checkpoint: Checkpoint, decoder: Model) -> EngineSettings:
    """Enlarges steps to hold the rows of any one picture, if these are computed at once, and a typical prompt with it,
    if that is; beside one token of every other running sequence. Configured sizes are kept."""
    if not settings.grows_steps or settings.hf is None or decoder.chunk_rule.may_end_in_run:
        return settings
    of_prompts = decoder.chunk_rule.of_prompts
    most = longest_run(checkpoint.folder, with_marks=of_prompts) + of_prompts * _USUAL_PROMPT
    wanted = most + settings.max_running - 1
    if wanted > settings.max_step_tokens:
        _log.info("steps are larger, since an item is computed at once", tokens=wanted, at_once=most)
        settings = msgspec.structs.replace(settings, max_step_tokens=wanted)
    return settings


def _drafting(
    settings: EngineSettings,
    served: ServedModel,
    target: Decoder | HfDecoder,
    text: TextSide | None,
    dtype: torch.dtype,
) -> Drafting | None:
    """What proposes drafts, if anything does. Only the first rank needs it; the others are told what to verify."""
    own, method = {"weight_dtype": settings.weight_dtype}, settings.speculative_method
    if not settings.draft_model and method not in DRAFT_HEADS:
        return None
    checkpoint = Checkpoint.resolve(settings.draft_model or settings.model)
    if method in DRAFT_HEADS:
        if not isinstance(target, Decoder):
            raise CheckpointError(f"--speculative-method {method}: it is not for a model that transformers computes")
        if method == "mtp":
            made = load_mtp_layer(checkpoint, target, dtype, text=text, **own)
        else:
            made = load_eagle_head(checkpoint, target, Checkpoint.resolve(settings.model), dtype, text=text, **own)
    else:
        made = load_draft_model(checkpoint, served, dtype, target.device, **own)
    weights = describe(made.decoder, settings.weight_dtype or quantization_of(checkpoint.config))
    _log.info("the draft model or head is in memory", takes_rows=made.takes_rows, **msgspec.structs.asdict(weights))
    return made


def _choose_kernels(names: list[str], group: TensorGroup, *, wait: bool) -> Changeover | None:
    """Uses our kernels, if all ranks have all of them; else torch's, while a process compiles ours. With `wait`, and if
    there is no folder to keep them in, they are compiled here and now."""
    from common.cpu.jit import compile_all, find

    missing = not_kept(names)
    if missing and (wait or any(find(name).folder is None for name in missing)):
        _log.info("our kernels are compiled before this serves", kernels=len(missing))
        compile_all(map(find, missing))
        missing = []
    all_there = bool(group.all_reduce_min(int(not missing)))
    selection.select(numba=all_there)
    if all_there:
        return None
    _log.info("our kernels are being compiled; torch computes until then", kernels=len(missing))
    return Changeover(Compilation(missing) if missing else None)


def _short_prompt_plan(settings: EngineSettings) -> tuple[StepPlan, int]:
    """A prompt short enough for the kernels for many rows, if there are any."""
    if settings.kernels == "torch":
        return prompt_plan(2, settings.block_size)
    from llm_service.layers.cpu.row_kernels import FEW

    return prompt_plan(FEW + 1, settings.block_size)


def _compile(decoder: Model, group: TensorGroup, device: torch.device) -> None:
    """Raises CheckpointError if torch cannot compile the layers' parts."""
    if device.type != "cuda":
        raise CheckpointError("--compile is for GPUs: a CPU's weights are laid out in a way that torch cannot compile")
    if group.size > 1:
        raise CheckpointError("--compile is for one rank: sums over ranks are not compiled")
    decoder.compile_layers()


def _capturable(runner: ModelRunner, group: TensorGroup) -> bool:
    """Whether there can be graphs on every rank, whose kernels may differ in trials; without them everything runs
    eagerly."""
    why = runner.not_capturable()
    agreed = bool(group.all_reduce_min(int(not why)))
    if not agreed:
        _log.warning("CUDA graphs are off", cause=why or "another rank has none")
    return agreed
