"""Both halves of what serves a model that transformers computes, in one process, beside transformers itself."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from common.checkpoints.checkpoint import Checkpoint
from common.hf import models as hf_models
from common.hf.description import HfModel
from common.hf.processors import Clip, Sound
from common.media.item import Grid, Header, Key, Modality
from encoder_service.media.video import open_reader
from encoder_service.models.hf.tower import HfTower
from encoder_service.models.processor import ItemProcessor, Shown
from encoder_service.worker.hf.batches import ByShape, Made
from llm_service.engine import sequence as running
from llm_service.model_config.served import ServedModel
from llm_service.models.decoder import Decoder
from llm_service.models.known_text import known_text
from llm_service.models.loader import TextSide
from llm_service.models.trial import Finding, try_out
from llm_service.prompt.builder import PromptBuilder
from llm_service.request import ChatPrompt, MediaItem, Message, SamplingParams
from testkit.local_engine import LocalEngine, Prompt
from tools.models.compare import OURS, answered_by, kept_of
from tools.models.prompts import VIDEO, Film, Part, Tones
from tools.models.reference import TOKENS, Reference

GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Served:
    """A checkpoint, and both halves of what serves it. Whether our decoder computes its text is tried once, and so is
    how transformers does."""

    folder: Path
    found: HfModel
    processor: ItemProcessor
    tower: HfTower
    builder: PromptBuilder
    _texts: dict[int, TextSide | None] = field(default_factory=dict)
    _findings: list[Finding] = field(default_factory=list)

    @classmethod
    def of(cls, folder: Path) -> Served:
        found = hf_models.describe(folder)
        tower = HfTower(folder, found, torch.float32, torch.device("cpu"))
        checkpoint = Checkpoint(folder)
        builder = PromptBuilder(checkpoint, ServedModel.by_hf(found))
        return cls(folder, found, ItemProcessor(folder), tower, builder)

    def prompt(self, parts: Sequence[Part]) -> Prompt:
        """One user message, laid out and encoded by us."""
        media = [part for part in parts if not isinstance(part, str)]
        headers, rows = zip(*map(self._encoded, media), strict=True) if media else ((), ())
        kinds = [header.modality for header in headers]
        items = iter(MediaItem(kind, Key(b""), index=n) for n, kind in enumerate(kinds))
        message = Message("user", tuple(part if isinstance(part, str) else next(items) for part in parts))
        pieces = self.builder.pieces(ChatPrompt((message,)), kinds)
        return Prompt(self.builder.layout(pieces, headers), list(rows), {})

    def _encoded(self, part: Image.Image | Film | Tones) -> tuple[Header, torch.Tensor]:
        shown: Shown
        blank: Shown
        if isinstance(part, Tones):
            kind, shown = Modality.AUDIO, Sound(part.heard())
            blank = Sound(np.zeros_like(shown.samples))
            key = hashlib.sha256(shown.samples.tobytes()).digest()
        elif isinstance(part, Film):
            kind, reader = Modality.VIDEO, open_reader(part.file)
            fps = float(reader.get_avg_fps())
            numbers = tuple(self.processor.frames(len(reader), fps, part.fps or 0.0))
            samples = part.heard() if part.with_sound else None
            shown = Clip(reader.get_batch(numbers).asnumpy(), numbers, len(reader), fps, samples, part.fps or 0.0)
            silence = None if samples is None else np.zeros_like(samples)
            blank = replace(shown, frames=np.zeros_like(shown.frames), samples=silence)
            key = hashlib.sha256(shown.frames.tobytes() + (b"" if samples is None else samples.tobytes())).digest()
        else:
            kind, shown = Modality.IMAGE, np.asarray(part)
            blank = np.zeros_like(shown)
            key = hashlib.sha256(shown.tobytes() + bytes(shown.shape[:2])).digest()
        parts = self.processor.replacement(blank)
        tokens = sum(each.rows for each in parts)
        with torch.inference_mode():
            if isinstance(shown, Clip) and shown.samples is not None:
                turns, sound = self.processor.turns(parts), self.processor.inputs(Sound(shown.samples))
                made = Made("video", self.processor.inputs(replace(shown, samples=None)), sound, turns)
            else:
                made = Made(kind.value, self.processor.inputs(shown))
            rows = ByShape(self.tower).run([made], [tokens])
        seconds = len(part.samples) / self.found.sound_rate if isinstance(part, Tones) else 0.0
        made_of = Header(key, kind, Grid(1, 1, tokens), tokens, seconds_per_grid=seconds, replacement=parts)
        return made_of, rows.clone()

    def adapter(self, prompt: Prompt) -> int:
        """The number of the checkpoint's own that it is computed with, 0 for none."""
        kinds = {span.header.modality for span in prompt.layout.spans}
        numbers = {path: n for n, path in enumerate(dict.fromkeys(self.found.adapters.values()), 1)}
        return next((numbers[path] for kind, path in self.found.adapters.items() if kind in kinds), 0)

    def computes(self, parts: Sequence[Part]) -> bool:
        """Whether the tower gives as many rows of a video as there are places: where not, requests fail."""
        try:
            self.prompt(parts)
        except RuntimeError as error:
            if "its processor has places for" not in str(error):
                raise
            return False
        return True

    def text(self, max_context: int = 0) -> TextSide | None:
        """What our decoder takes of the checkpoint; None where transformers computes."""
        if max_context not in self._texts:
            self._texts[max_context] = known_text(Checkpoint(self.folder), self.found, max_context=max_context)
        return self._texts[max_context]

    def finding(self) -> Finding:
        """What a trial says of transformers' text model."""
        if not self._findings:
            self._findings.append(try_out(self.folder))
        return self._findings[0]

    def engine(self, *, by_hf: bool = False, max_context: int = 0, **options: Any) -> LocalEngine:
        text = None if by_hf else self.text(max_context)
        finding = self.finding() if text is None else None
        return LocalEngine(self.folder, hf=self.found, text=text, finding=finding, **options)


def with_text(folder: Path, **settings: Any) -> Path:
    """A checkpoint whose text is told other settings."""
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= settings
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def compare(served: Served, step_tokens: int = 16, *, by_hf: bool = False) -> set[str]:
    """Asserts that ids and greedy tokens are those of transformers: in short steps, at once beside others, and from the
    prefix cache. The text is computed as it is served, or by transformers. Returns the names of the prompts that were
    compared, and `OURS` where our decoder computed."""
    answered = answered_by(Reference(served.folder), served.found)
    if VIDEO in answered and not served.computes(answered[VIDEO].parts):
        del answered[VIDEO]
    expected = {name: each.tokens for name, each in answered.items()}
    prompts = {name: served.prompt(each.parts) for name, each in answered.items()}
    for name, prompt in prompts.items():
        assert prompt.layout.ids == answered[name].inputs["input_ids"][0].tolist(), name
    chunked = served.engine(by_hf=by_hf, step_tokens=step_tokens, max_running=1)
    for name, prompt in prompts.items():
        answer = chunked.run([prompt], GREEDY, [served.adapter(prompt)])[0]
        assert answer.tokens == expected[name], f"{name}, in short steps"
    company = served.engine(by_hf=by_hf, prefix_cache=True)
    names = [*prompts, next(name for name in prompts if name != "text")]
    for cached in (False, True):
        every = [prompts[name] for name in names]
        outcomes = company.run(every, GREEDY, [served.adapter(prompt) for prompt in every])
        for name, outcome in zip(names, outcomes, strict=True):
            assert outcome.tokens == expected[name], f"{name}, {'from the cache' if cached else 'beside others'}"
        kept = [kept_of(served.found, len(prompts[name].layout.ids)) for name in names]
        assert not cached or [outcome.cached for outcome in outcomes] == kept
    ours = {isinstance(engine.decoder, Decoder) for engine in (chunked, company)}
    assert len(ours) == 1
    return {*prompts, *([OURS] if ours == {True} else [])}


def foreseen(prompt: Prompt, expected: list[int]) -> Callable[[running.Sequence, int], array[int]]:
    """Drafts for a prompt whose answer is known: of each three the last is wrong."""
    begin = len(prompt.layout.ids)

    def drafts(sequence: running.Sequence, count: int) -> array[int]:
        done = len(sequence.tokens) - begin
        right = expected[done : done + min(3, count)]
        return array("i", [*right[:-1], *[token ^ 1 for token in right[-1:]]])

    return drafts
