"""transformers itself over a checkpoint: what its processor makes of a message, and its greedy tokens."""

from __future__ import annotations

import inspect
import warnings
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from common.hf.classes import class_of, complete, config_of, speaking, transformers
from common.hf.layouts import LAYOUTS, VoxtralLayout
from common.hf.models import own_adapters
from common.hf.processors import frame_of, processor_of
from encoder_service.media.video import open_reader
from tools.models.prompts import Film, Part, Tones, kind_of

TOKENS = 32


class Reference:
    """transformers itself over a checkpoint, on the CPU in float32. Raises ImportError where it wants a package that is
    not there."""

    def __init__(self, folder: Path) -> None:
        config = config_of(folder)
        self._lays_out_chats = LAYOUTS.get(config.model_type) is VoxtralLayout
        if self._lays_out_chats:  # by a package that transformers only wants where it is used
            import_module("mistral_common")
        chats = transformers().AutoProcessor
        self.processor = chats.from_pretrained(folder) if self._lays_out_chats else processor_of(folder)
        template = folder / "chat_template.jinja"
        self._template = self.processor.chat_template
        if self._template is None and template.exists():  # some processors do not read it
            self._template = template.read_text("utf-8")
        frame = None if self._lays_out_chats else frame_of(self.processor)
        self._frames_texts = frame is not None and frame.always
        given: dict[str, Any] = {"config": config, "dtype": torch.float32, "local_files_only": True}
        self.model = complete(class_of(config).from_pretrained(folder, **given)).eval()
        self._adapters = own_adapters(self.model.config, folder)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Already found a `peft_config`")  # there may be several
            for modality, path in self._adapters.items():
                if path != ".":  # which transformers has loaded
                    self.model.load_adapter(str(folder), modality, adapter_kwargs={"subfolder": path})
        if config.model_type in _VIDEOS_WHOLE:
            self.model.get_video_features = _in_parts(self.model.get_video_features)
        for model in (self.model, speaking(self.model)):
            model.generation_config.eos_token_id = None

    def inputs(self, parts: Sequence[Part]) -> dict[str, Any]:
        """What its processor makes of one user message."""
        if self._lays_out_chats:
            chat = [{"role": "user", "content": list(map(_in_chat, parts))}]
            return dict(self.processor.apply_chat_template(chat, tokenize=True, return_dict=True))
        content = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": kind_of(part)} for part in parts
        ]
        chat = [{"role": "user", "content": content}]
        told: dict[str, Any] = {"chat_template": self._template, "add_generation_prompt": True}
        text = self.processor.apply_chat_template(chat, tokenize=False, **told)
        options: dict[str, Any] = {"text": [text], "return_tensors": "pt"}
        options["add_special_tokens"] = not text.startswith("<s>")
        media = self._media(parts)
        if not media and not self._frames_texts:  # some processors want a picture in every text
            made = dict(self.processor.tokenizer(**options))
            if "token_type_ids" in self.processor.model_input_names:
                made["token_type_ids"] = torch.zeros_like(made["input_ids"])
            return made
        if "mm_token_type_ids" in inspect.signature(self.model.forward).parameters:
            options["return_mm_token_type_ids"] = True
        made = self.processor(**options, **media)
        made.pop("video_metadata", None)
        return dict(made.to(self.model.dtype))  # some make pixels of 16 bits

    @torch.no_grad()
    def rows(self, modality: str, inputs: Mapping[str, Any]) -> Tensor:
        """What its tower makes of the only item of such inputs, [n, width]."""
        compute = getattr(self.model.base_model, f"get_{modality}_features")
        taken = inspect.signature(compute).parameters
        made = compute(**{name: value for name, value in inputs.items() if name in taken}, return_dict=True)
        rows: Tensor = made.pooler_output
        return rows

    def _media(self, parts: Sequence[Part]) -> dict[str, Any]:
        stills = [part for part in parts if isinstance(part, Image.Image)]
        films = [open_reader(part.file) for part in parts if isinstance(part, Film)]
        media: dict[str, Any] = {"images": stills} if stills else {}
        if heard := [part for part in parts if isinstance(part, Tones) or (isinstance(part, Film) and part.with_sound)]:
            media["audio"] = [part.heard() for part in heard]
        if any(isinstance(part, Film) for part in heard):
            shown = [part for part in parts if isinstance(part, Film)]
            media["audio_from_video_indices"] = [
                next(at for at, each in enumerate(shown) if each is part) if isinstance(part, Film) else None
                for part in heard
            ]
            media["load_audio_from_video"] = True
        if films:
            media["videos"] = [each.get_batch(range(len(each))).asnumpy() for each in films]
            media["video_metadata"] = [_about(each) for each in films]
            media["return_metadata"] = True  # some place frames by it, and do not ask for it
            if rates := {part.fps for part in parts if isinstance(part, Film) and part.fps is not None}:
                (media["fps"],) = rates  # one for all
                media["do_sample_frames"] = True
            elif not self.processor.video_processor.do_sample_frames:
                for about in media["video_metadata"]:
                    about["frames_indices"] = list(range(about["total_num_frames"]))
        return media

    @torch.no_grad()
    def tokens(self, inputs: Mapping[str, Any]) -> list[int]:
        """Greedy ones, whatever ends an answer; where there are items with the adapter that the checkpoint has for
        them, if it has one."""
        if self._adapters:
            self._choose_adapter({kind for kind, name in _TOLD_BY if name in inputs})
        more = {"use_audio_in_video": True} if self._has_sound_in_video(inputs) else {}
        if "sample" in inspect.signature(self.model.forward).parameters:  # draws noise for sounds
            more["sample"] = False
        model = self.model if "pixel_values" in inputs else speaking(self.model)
        out = model.generate(**inputs, **more, max_new_tokens=TOKENS, do_sample=False)
        return [int(token) for token in out[0, inputs["input_ids"].shape[1] :]]

    def _choose_adapter(self, kinds: set[str]) -> None:
        """That of the first of a prompt's modalities that has one: by PEFT's own layers, since transformers' methods
        ask for a release of PEFT that there may not be yet."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        chosen = next((kind for kind in self._adapters if kind in kinds), None)
        for module in self.model.modules():
            if isinstance(module, BaseTunerLayer):
                module.enable_adapters(chosen is not None)
                if chosen is not None and self._adapters[chosen] != ".":
                    module.set_adapter(chosen)

    def _has_sound_in_video(self, inputs: Mapping[str, Any]) -> bool:
        """A video begins with its sound's mark, by which the model's own rule of places tells it as well."""
        starts = [getattr(self.model.config, f"{kind}_start_token_id", None) for kind in ("vision", "audio")]
        ids = inputs["input_ids"][0].tolist()
        return None not in starts and starts in [ids[at : at + 2] for at in range(len(ids))]


_TOLD_BY = ("image", "image_pixel_values"), ("audio", "input_features"), ("audio", "audio_input_features")
"""By which of its tensors a prompt is known to have items of a modality, in models with adapters for some."""
_VIDEOS_WHOLE = ("nemotron_h_omni",)
"""Kinds whose forward fails on a video in this release, as it joins what its tower gives as one: it gets that in
parts."""


def _in_parts(compute: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(compute)  # transformers asks for its arguments
    def parts(*given: Any, **named: Any) -> Any:
        made = compute(*given, **named)
        made.pooler_output = tuple(made.pooler_output)
        return made

    return parts


def _in_chat(part: Part) -> dict[str, str]:
    """As conversations have it whose processor takes media among them."""
    if isinstance(part, Tones):
        return {"type": "audio", "base64": b64encode(part.file()).decode()}
    assert isinstance(part, str), "sounds alone are taken so"
    return {"type": "text", "text": part}


def _about(reader: Any) -> dict[str, Any]:
    total, fps = len(reader), float(reader.get_avg_fps())
    height, width = reader[0].shape[:2]
    return {"total_num_frames": total, "fps": fps, "duration": total / fps, "height": height, "width": width}
