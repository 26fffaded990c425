"""Processors of transformers that do not tell an item's layout in a prompt, or not as others do, replaced by wrappers,
by kind of model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from common.checkpoints import tekken
from common.checkpoints.checkpoint import Checkpoint
from common.hf.classes import transformers


class VoxtralLayout:
    """Voxtral's processor lays out sounds in conversations only, by a package of Mistral's. Here a text has
    `audio_token` for each sound, as with other processors, and its replacement is a mark and places for rows, by the
    sound's length.

    Features are extracted by transformers. Everything else is the processor's.
    """

    def __init__(self, folder: Path) -> None:
        checkpoint = Checkpoint(folder)
        self._tekken = checkpoint.json(tekken.FILE)
        made = Tokenizer.from_str(checkpoint.tokenizer())
        names = {"bos_token": tekken.BOS, "eos_token": tekken.EOS, "pad_token": "<pad>"}
        self.tokenizer = transformers().PreTrainedTokenizerFast(tokenizer_object=made, **names)
        self.feature_extractor = transformers().AutoFeatureExtractor.from_pretrained(folder, local_files_only=True)
        self._of = transformers().VoxtralProcessor(self.feature_extractor, self.tokenizer)
        self.audio_token = tekken.AUDIO

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_of"], name)

    def __call__(self, text: Sequence[str], audio: Sequence[np.ndarray] = (), **options: Any) -> Any:
        """One text with as many placeholders as sounds, float32 [n] each at `sampling_rate`. Raises ValueError if there
        are more or fewer."""
        parts = text[0].split(self.audio_token)
        if len(parts) != len(audio) + 1:
            raise ValueError(f"there are {len(parts) - 1} places for {len(audio)} sounds")
        replacements = list(self._replacements(audio))
        whole = parts[0] + "".join(own + part for own, part in zip(replacements, parts[1:], strict=True))
        tensors = {"return_tensors": options.get("return_tensors")}
        more: dict[str, Any] = {}
        if audio:
            told = dict(self._of.audio_kwargs)
            each = told.pop("max_source_positions")
            more["input_features"] = self._of._retrieve_input_features(audio, each, **told)
        if options.get("return_text_replacement_offsets"):
            more["text_replacement_offsets"] = [[{"replacement": own} for own in replacements]]
        return transformers().BatchFeature({**self.tokenizer([whole], **tensors), **more})

    def _replacements(self, audio: Sequence[np.ndarray]) -> Iterator[str]:
        for samples in audio:
            yield tekken.BEGIN_AUDIO + self.audio_token * tekken.sound_rows(self._tekken, len(samples))


class NemotronOmniLayout:
    """Nemotron-H Omni's processor replaces marks in texts without telling by what, and takes the metadata of its only
    video where others take a list. Everything else is the processor's."""

    def __init__(self, folder: Path) -> None:
        self._of = transformers().AutoProcessor.from_pretrained(folder, local_files_only=True)
        self._replace = self._of.get_text_with_replacements
        self._of.get_text_with_replacements = self._noted
        self._offsets: list[list[dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_of"], name)

    def __call__(self, text: Sequence[str], **options: Any) -> Any:
        """As other processors: one text with as many marks as items. Raises ValueError for more than one video."""
        told = options.pop("return_text_replacement_offsets", False)
        if about := options.pop("video_metadata", None):
            if len(about) > 1:
                raise ValueError("it takes one video")
            options["video_metadata"] = transformers().video_utils.VideoMetadata(**about[0])
        made = self._of(text=list(text), **options)
        if told:
            made["text_replacement_offsets"] = self._offsets
        return made

    def _noted(self, text: list[str], **replacements: Any) -> Any:
        found, self._offsets = self._replace(text, **replacements)
        return found, self._offsets


class Idefics2Layout:
    """Idefics2's processor puts marks around pictures without telling: of two adjacent marks one stays, and a word
    right behind one gets a space.

    Texts and pictures are processed by transformers. Everything else is the processor's.
    """

    def __init__(self, folder: Path) -> None:
        self._of = transformers().AutoProcessor.from_pretrained(folder, local_files_only=True)
        self.seam = str(self._of.fake_image_token)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_of"], name)

    def __call__(self, text: Sequence[str], images: Sequence[Any] | None = None, **options: Any) -> Any:
        """One text with as many placeholders as pictures."""
        told = options.pop("return_text_replacement_offsets", False)
        made = self._of(text=[*text], images=images, **options)
        if told:
            tiles = 5 if self._of.image_processor.do_image_splitting else 1
            own = (self.seam + self._of.image_token * self._of.image_seq_len) * tiles + self.seam
            made["text_replacement_offsets"] = [[{"replacement": own}] * len(images or ())]
        return made


class RunLayout:
    """A processor whose texts already have a token for each row, as in PP-Chart2Table's chat template, and that names
    no such token. Here one token stands for a picture as well as a run with one for each row. Everything else is the
    processor's."""

    def __init__(self, folder: Path) -> None:
        self._of = transformers().AutoProcessor.from_pretrained(folder, local_files_only=True)
        config = transformers().AutoConfig.from_pretrained(folder, local_files_only=True)
        self.image_token = str(self._of.tokenizer.convert_ids_to_tokens(config.image_token_id))
        self.run = int(config.image_seq_length)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_of"], name)

    def __call__(self, text: Sequence[str], images: Sequence[Any] | None = None, **options: Any) -> Any:
        """One text with as many placeholders as pictures. Raises ValueError if there are more or fewer."""
        told, own = options.pop("return_text_replacement_offsets", False), self.image_token * self.run
        token = re.escape(self.image_token)
        whole, count = re.subn(f"(?:{token}){{{self.run}}}|{token}", own, text[0])
        if count != len(images or ()):
            raise ValueError(f"there are {count} places for {len(images or ())} pictures")
        made = self._of(text=[whole], images=images, **options)
        if told:
            made["text_replacement_offsets"] = [[{"replacement": own}] * count]
        return made


class Blip2Layout:
    """BLIP-2's processor puts a picture's tokens before the text, which begins as the tokenizer begins texts. Here the
    same holds for the text behind the picture's placeholder, whatever precedes it. Everything else is the
    processor's."""

    def __init__(self, folder: Path) -> None:
        self._of = transformers().AutoProcessor.from_pretrained(folder, local_files_only=True)
        self.image_token = str(self._of.image_token)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_of"], name)

    def __call__(self, text: Sequence[str], images: Sequence[Any] | None = None, **options: Any) -> Any:
        """One text with a placeholder for its only picture, if there is one. Raises ValueError for more."""
        told = options.pop("return_text_replacement_offsets", False)
        before, place, behind = text[0].partition(self.image_token)
        if (len(images or ()), self.image_token in behind) != (bool(place), False):
            raise ValueError("it takes one picture, and a text has a place for it")
        if not images:
            return self._of.tokenizer([*text], **options)
        made = self._of(text=[behind], images=images, **{**options, "add_special_tokens": True})
        ids = self._of.tokenizer([before], add_special_tokens=False, return_tensors="pt")["input_ids"].long()
        made["input_ids"] = torch.cat([ids, torch.as_tensor(made["input_ids"])], dim=1)
        made["attention_mask"] = torch.ones_like(made["input_ids"])
        if told:
            made["text_replacement_offsets"] = [[{"replacement": self.image_token * self._of.num_query_tokens}]]
        return made


RUN = "run"
"""Attribute of layouts that take so many adjacent tokens for an item (`HfModel.run`)."""
SEAM = "seam"
"""Attribute of layouts that change texts beside items (`HfModel.seam`)."""


LAYOUTS: dict[str, Callable[[Path], Any]] = {
    "voxtral": VoxtralLayout,
    "nemotron_h_omni": NemotronOmniLayout,
    "idefics2": Idefics2Layout,
    "pp_chart2table": RunLayout,
    "blip-2": Blip2Layout,
}
