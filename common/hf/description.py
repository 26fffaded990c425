"""Models without a family of ours, as transformers describes them. A separate process asks it, because it loads torch,
which a service's front does not."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from typing import Any, Final

import msgspec

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.media.encoder_digest import EncoderParts
from common.requirements import install

HF_ENCODER: Final = EncoderParts(
    tensors=("",),
    section="",
    files=(
        "config.json",
        "preprocessor_config.json",
        "video_preprocessor_config.json",
        "processor_config.json",
        "tokenizer_config.json",
        "tekken.json",
    ),
    package="transformers",
)
"""Tensors count unless transformers says that they belong to the text alone (`HfModel.encoder`)."""

run: Callable[..., Any] = subprocess.run
"""Runs the process that asks transformers. Tests that describe many models replace it by something faster."""
LEAST: Final = (5, 23)
"""The first version of transformers that has everything asked of it."""
_SECONDS = 300.0
_PROCESS = "common.hf.models"


class PromptFrame(msgspec.Struct, frozen=True):
    """What a processor adds to a prompt with items: at its `begin`, instead of the tokenizer's own, `behind` its last
    item, and at its `end`. These are texts, with special tokens by name. `always`: also to a prompt without items.
    `once`: not before a text that already begins with `begin`."""

    begin: str = ""
    behind: str = ""
    end: str = ""
    always: bool = False
    once: bool = False

    @property
    def lays_out(self) -> bool:
        """It sets something: prompts are laid out by the processor, and need no chat template."""
        return bool(self.behind or self.end)


class HfModel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What there is to know of a model before it is loaded.

    A row has `levels` times `hidden_size` numbers. `placeholders` are the tokens that stand for an item in a prompt, by
    its modality. `max_position` is the longest context. Places are counted on `axes` axes, 1, 3 or 4. `alone`: of which
    modalities what stands for an item, or its rows, depend on what is beside it in a prompt, so that there is to be
    nothing. `video_sound`: a video's sound may go between its frames. `frame` is what else its processor sets into
    prompts, None: nothing but what its tokenizer does. `text` is the text's part of the configuration, as JSON has it,
    every default filled in. `together`: tokens of pictures and of marks around them, as the processor tells them from
    text. `adapters`: folders of the checkpoint's own adapters, within its own, by the modality that a prompt has which
    is computed with one; of several the first counts. Sounds have `sound_rate` samples a second; a chat's text has
    their seconds in the stead of each `duration_mark`, if there is one. Of two marks `seam` that touch in a prompt one
    stays, and a word right behind one gets a space. Sequences of more places than `long_rope_threshold` turn by other
    rotary frequencies; 0: none do. Tokens that are `pinned` stay, on all axes, at an item's time right behind it. What
    stands for an item has its number among those of its modality behind a `number_mark` that it begins with, if any.
    `run`: so many placeholders side by side stand for an item, as one does; 0: each stands for one. `tower_tensors`:
    how the names of the checkpoint's tensors begin that are not the text's alone, as far as that is known.
    """

    architecture: str
    hidden_size: int
    vocab_size: int
    max_position: int
    placeholders: dict[str, int]
    levels: int = 1
    axes: int = 1
    alone: tuple[str, ...] = ()
    video_sound: bool = False
    frame: PromptFrame | None = None
    text: dict[str, Any] = {}
    together: tuple[int, ...] = ()
    sound_rate: int = 16_000
    duration_mark: str = ""
    seam: str = ""
    number_mark: str = ""
    run: int = 0
    long_rope_threshold: int = 0
    pinned: tuple[int, ...] = ()
    adapters: dict[str, str] = {}
    tower_tensors: tuple[str, ...] = HF_ENCODER.tensors

    @property
    def encoder(self) -> EncoderParts:
        """The parts of the checkpoint that compute rows."""
        return dataclasses.replace(HF_ENCODER, tensors=self.tower_tensors)


def describe(checkpoint: Checkpoint) -> HfModel:
    """Asks transformers, which takes seconds. Raises CheckpointError, in one sentence, if it is missing, too old, does
    not know the model, or we cannot serve it."""
    kind, wanted = checkpoint.config.get("model_type", "?"), f"install it with {install('transformers')}"
    if find_spec("transformers") is None:
        raise CheckpointError(f"{kind} needs transformers: {wanted}")
    if is_too_old(found := metadata.version("transformers")):
        least = ".".join(map(str, LEAST))
        raise CheckpointError(f"{kind} needs transformers, version {least} or later, and this is {found}: {wanted}")
    done = run(
        [sys.executable, "-m", _PROCESS, str(checkpoint.folder)],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        raise CheckpointError(
            f"transformers cannot describe the model: {(done.stderr.splitlines() or ['it died'])[-1]}"
        )
    answer = msgspec.json.decode(lines[-1], type=HfModel | Refusal)
    if isinstance(answer, Refusal):
        raise CheckpointError(answer.why)
    return answer


def is_too_old(version: str) -> bool:
    """Whether a version of transformers lacks what models need that it computes; families of ours do without.

    >>> is_too_old("5.17.0"), is_too_old("5.23.0"), is_too_old("6.0.dev0")
    (True, False, False)
    """
    return tuple(map(int, version.split(".")[:2])) < LEAST


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """Why a model is not served, in one sentence."""

    why: str
