"""The reference: the `transformers` library's own processors and models, as parity tests compare with.

Import this module before anything that imports `transformers` (`declare_operators` says why).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.hf.classes import declare_operators
from encoder_service.media.video import open_reader

declare_operators()

import transformers  # noqa: E402
from PIL import Image  # noqa: E402
from transformers import AutoModelForImageTextToText, AutoProcessor, GenerationMixin, LlamaModel  # noqa: E402

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

CACHE = "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"  # before 5.24
"""What transformers' models call a cache that they are given, or give."""


@dataclass(frozen=True, slots=True)
class Video:
    """A decoded video: frames [T, H, W, 3] uint8 and its rate in frames per second."""

    frames: np.ndarray
    fps: float

    @classmethod
    def read(cls, file: bytes) -> Video:
        """All frames of a file."""
        reader = open_reader(file)
        return cls(reader.get_batch(range(len(reader))).asnumpy(), reader.get_avg_fps())


@lru_cache(maxsize=8)
def processor(directory: Path) -> Any:
    """transformers' processor of a checkpoint."""
    return AutoProcessor.from_pretrained(directory, local_files_only=True)


@lru_cache(maxsize=8)
def model(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model of a checkpoint, on the CPU."""
    return new_model(directory, dtype)


def new_model(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The same for whoever changes it."""
    loaded = AutoModelForImageTextToText.from_pretrained(directory, dtype=dtype, local_files_only=True)
    return loaded.eval()


def images_inputs(directory: Path, images: Sequence[Image.Image]) -> tuple[torch.Tensor, torch.Tensor]:
    """Patches [sum(t·h·w), dim] float32 and grids [n, 3] of pictures."""
    out = processor(directory).image_processor(images=list(images), return_tensors="pt")
    return out["pixel_values"], out["image_grid_thw"]


def video_inputs(
    directory: Path, video: Video, *, fps: float = 2.0, **settings: Any
) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Patches [t·h·w, dim] float32, grid [1, 3] and metadata of a video that is sampled at `fps`."""
    out = processor(directory).video_processor(
        videos=[video.frames],
        video_metadata=[_metadata(video)],
        do_sample_frames=True,
        fps=fps,
        return_metadata=True,
        return_tensors="pt",
        **settings,
    )
    return out["pixel_values_videos"], out["video_grid_thw"], out["video_metadata"][0]


@torch.no_grad()
def rows(directory: Path, patches: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
    """Embedding rows [tokens, levels, width] float32 of all items together."""
    out = model(directory).model.visual(patches, grid_thw=grids)
    return torch.stack([out.pooler_output, *(getattr(out, "deepstack_features", None) or [])], dim=1)


def reference_inputs(
    directory: Path,
    messages: list[dict[str, Any]],
    images: Sequence[Image.Image] = (),
    videos: Sequence[Video] = (),
    *,
    fps: float = 2.0,
) -> dict[str, torch.Tensor]:
    """Everything that transformers' model takes for a chat, plus `position_ids` [3, 1, n] and `rope_deltas` [1, 1].

    `messages` hold parts {"type": "image"}, {"type": "video"} and {"type": "text", "text": …}; the media are given
    beside them, in order.
    """
    whole = processor(directory)
    text = whole.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    media: dict[str, Any] = {}
    if images:
        media["images"] = list(images)
    if videos:
        media |= {
            "videos": [video.frames for video in videos],
            "do_sample_frames": True,
            "fps": fps,
            "video_metadata": [_metadata(video) for video in videos],
        }
    inputs = dict(whole(text=[text], return_tensors="pt", **media))
    positions, deltas = model(directory).model.get_rope_index(
        **{name: inputs[name] for name in _ROPE_INPUTS if name in inputs}
    )
    return {**inputs, "position_ids": positions, "rope_deltas": deltas}


_ROPE_INPUTS = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts")


@torch.no_grad()
def reference_generate(
    directory: Path, inputs: dict[str, torch.Tensor], max_tokens: int = 64, *, by: Any = None, **more: Any
) -> list[int]:
    """Greedy token ids, exactly `max_tokens` of them: stops are ignored. `by` is another model than transformers' of
    the checkpoint; `more` is what else its `generate` is given."""
    given = {name: value for name, value in inputs.items() if name not in ("position_ids", "rope_deltas")}
    loaded = by or model(directory)
    settings = [loaded.generation_config]
    if isinstance(within := getattr(loaded, "language_model", None), GenerationMixin):  # which may go on with it
        settings.append(within.generation_config)
    stops = [each.eos_token_id for each in settings]
    for each in settings:
        each.eos_token_id = None
    try:
        out = loaded.generate(**given, max_new_tokens=max_tokens, do_sample=False, **more)
    finally:
        for each, stop in zip(settings, stops, strict=True):
            each.eos_token_id = stop
    return [int(token) for token in out[0, inputs["input_ids"].shape[1] :]]


@torch.no_grad()
def reference_logits(
    directory: Path, inputs: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Logits [n, vocabulary] of a whole prompt."""
    given = {name: value for name, value in inputs.items() if name not in ("position_ids", "rope_deltas")}
    logits: torch.Tensor = model(directory, dtype)(**given).logits[0]
    return logits


def _metadata(video: Video) -> dict[str, Any]:
    count, height, width = video.frames.shape[:3]
    return {
        "total_num_frames": count,
        "fps": video.fps,
        "width": width,
        "height": height,
        "duration": count / video.fps,
    }


@torch.no_grad()
def pruned_tokens(
    directory: Path, inputs: dict[str, torch.Tensor], rows: torch.Tensor, mask: np.ndarray, count: int
) -> tuple[list[int], torch.Tensor, list[int]]:
    """Ids and positions [3, n] of a prompt with one video without the rows that `mask` [tokens] drops, and `count`
    greedy tokens that follow. `rows` [kept, levels, width] are those that stay."""
    loaded = model(directory)
    decoder = loaded.model.language_model
    ids, positions = inputs["input_ids"][0], inputs["position_ids"]
    placeholder = ids == loaded.config.video_token_id
    stays = ~placeholder
    stays[placeholder] = torch.from_numpy(mask)
    ids, positions, visual = ids[stays], positions[:, :, stays], placeholder[stays]
    hidden = decoder.get_input_embeddings()(ids)
    hidden[visual] = rows[:, 0]
    deep = list(rows[:, 1:].unbind(1))
    out: list[int] = []
    where = positions
    for _ in range(count):
        given = {"visual_pos_masks": visual[None], "deepstack_visual_embeds": deep} if deep else {}
        states = decoder(inputs_embeds=hidden[None], position_ids=where, use_cache=False, **given).last_hidden_state
        out.append(int(loaded.lm_head(states[0, -1]).argmax()))
        hidden = torch.cat([hidden, decoder.get_input_embeddings()(torch.tensor(out[-1:]))])
        where = torch.cat([where, where.amax() + torch.ones(3, 1, 1, dtype=where.dtype)], dim=2)
        visual = torch.cat([visual, torch.zeros(1, dtype=torch.bool)])
    return ids.tolist(), positions[:, 0], out
