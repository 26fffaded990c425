"""The settings of engine processes, from the service's configuration and its checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.hardware import default_dtype
from llm_service.cache_choice import choose_cache
from llm_service.config import LlmConfig, Meeting
from llm_service.model_config.adapter_folder import CONFIG, AdapterError, largest_rank
from llm_service.model_config.served import ServedModel
from llm_service.settings import EngineSettings, RankPlace


def first_rank(config: LlmConfig, meeting: Meeting) -> RankPlace:
    """The first rank of a host that lends its devices."""
    return RankPlace(
        rank=meeting.node_rank * (config.tp // meeting.nodes),
        size=config.tp,
        nodes=meeting.nodes,
        host=meeting.host,
        port=meeting.port,
        timeout=config.rank_timeout_seconds,
        device=config.chosen_device,
        model=str(Checkpoint.resolve(config.model, config.revision).folder),
        threads=config.threads,
    )


def engine_settings(config: LlmConfig, checkpoint: Checkpoint, served: ServedModel) -> EngineSettings:
    """The settings of rank 0; the other ranks get them from it. Raises CheckpointError if the checkpoint cannot be
    served as configured."""
    device = config.chosen_device
    meeting, (running, step_tokens) = config.meeting(), config.step_limits()
    dtype = default_dtype(device, checkpoint) if config.dtype == "auto" else config.dtype
    asked, attention = config.kv_cache_dtype, config.attention
    kept, suggested = choose_cache(asked, checkpoint.config, dtype=dtype, device=device, attention=attention)
    draft_model = str(Checkpoint.resolve(config.draft_model).folder) if config.draft_model else ""
    return EngineSettings(
        model=str(checkpoint.folder),
        device=device,
        dtype=dtype,
        weight_dtype=config.weight_dtype,
        threads=config.threads,
        tensor_parallel=config.tp,
        nodes=meeting.nodes,
        rendezvous=meeting.address,
        rank_timeout=config.rank_timeout_seconds,
        symmetric_memory=config.symmetric_memory,
        expert_parallel=config.enable_expert_parallel,
        attention=config.attention,
        kernels=config.kernels,
        compile=config.compile,
        graphs=config.graphs,
        graph_bytes=config.graph_bytes,
        kv_cache_dtype=kept,
        kv_cache_suggested=suggested,
        kv_cache_bytes=config.kv_cache_bytes,
        kv_memory_share=config.kv_memory_share,
        kv_host_bytes=config.kv_host_bytes,
        kv_events=bool(config.kv_events),
        block_size=config.block_size,
        max_context=config.max_context,
        max_running=running,
        max_step_tokens=step_tokens,
        decode_slowdown=config.decode_slowdown,
        core_share=config.core_share,
        prefix_cache=config.prefix_cache,
        keep_media_whole=config.keep_media_whole,
        early_prefill_tokens=config.early_prefill_tokens,
        overlap=config.overlap == "yes"
        or (config.overlap == "auto" and device != "cpu" and not config.speculative_tokens),
        speculative_tokens=config.speculative_tokens,
        speculative_method=config.method if config.speculative_tokens else "",
        draft_model=draft_model,
        session_share=config.session_share,
        snapshot_share=config.snapshot_share,
        structure_cache_bytes=config.structure_cache_bytes,
        row_arena_bytes=config.row_cache_bytes,
        row_levels=served.levels,
        row_mirror=config.row_mirror,
        log_level=config.log_level,
        **_adapter_settings(config, checkpoint, served),
        base_names=tuple({Path(name).name for name in (checkpoint.name, *config.served_model_name)}),
        hf=served.hf,
        grows_steps=not config.max_step_tokens,
    )


def _adapter_settings(config: LlmConfig, checkpoint: Checkpoint, served: ServedModel) -> dict[str, Any]:
    """The slots of adapters and where they are read from: the operator's folder, or the checkpoint's own. Raises
    CheckpointError if both are configured, or the folder is missing."""
    own = set(served.hf.adapters.values()) if served.hf is not None else set[str]()
    if not own:
        if config.lora_dir and not Path(config.lora_dir).is_dir():
            raise CheckpointError(f"--lora-dir {config.lora_dir} is not a folder")
        folder = config.lora_dir and str(Path(config.lora_dir).resolve())
        slots = config.max_loras if config.lora_dir else 0
        return {"lora_dir": folder, "max_loras": slots, "max_lora_rank": config.max_lora_rank}
    if config.lora_dir:
        raise CheckpointError("--lora-dir is not for a checkpoint that has adapters of its own")
    if config.compile:
        raise CheckpointError("--compile is not for a checkpoint that has adapters of its own")
    try:
        rank = max(largest_rank(checkpoint.json(str(Path(path) / CONFIG))) for path in own)
    except AdapterError as error:
        raise CheckpointError(f"the checkpoint's own adapter cannot be loaded: {error}") from error
    return {"lora_dir": "", "max_loras": len(own), "max_lora_rank": rank}
