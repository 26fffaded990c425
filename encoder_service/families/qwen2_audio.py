"""Qwen2-Audio: clips of up to 30 seconds, heard as Whisper does, as powers of mel bands each hundredth of a second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.errors import InvalidInput
from common.media.encoder_digest import QWEN2_AUDIO_PARTS
from common.media.item import Grid, Modality, Options, Pixels
from encoder_service.families.family import Family, Processor
from encoder_service.item import SAMPLE_RATE, Inspection, Plan


@dataclass(frozen=True, slots=True)
class ClipProcessor:
    """Clips of at most `seconds`: the power in `bands` bands of every `hop` samples, over windows of `window` samples.
    Two of these frames make a position of the tower, which the grid counts along its width, and two positions make a
    row."""

    bands: int
    window: int
    hop: int
    seconds: int
    preprocess: str = "encoder_service.worker.log_mel:preprocess"
    merge: int = 1

    @property
    def samples(self) -> int:
        """The longest clip, in samples."""
        return self.seconds * SAMPLE_RATE

    def rows(self, grid: Grid) -> int:
        """The position at the end that has no other is no row's."""
        longest = self.samples // self.hop // 2
        return grid.w // 2 if (grid.t, grid.h) == (1, 1) and grid.w <= longest else 0

    def plan(self, seen: Inspection, options: Options) -> Plan:  # noqa: ARG002 - there are none for sound
        """A second is 100 frames, 50 positions and 25 rows."""
        if seen.frames > self.samples:
            raise InvalidInput(f"the model hears {self.seconds} seconds at a time", reason="AUDIO_TOO_LONG")
        frames = -(-seen.frames // self.hop)
        grid = Grid(1, 1, (frames - 1) // 2 + 1)
        if not (rows := self.rows(grid)):
            raise InvalidInput("the sound is shorter than a row", reason="AUDIO_TOO_SHORT")
        return Plan(grid, rows, (0,), 1, seen.frames, (1, seen.frames), depth=4)

    def plan_pixels(self, given: Pixels, options: Options) -> Plan:  # noqa: ARG002
        """Sounds have no pixels."""
        raise InvalidInput("pixels cannot be a sound", reason="BAD_PIXELS")


_DEFAULTS: Final = {
    "num_mel_bins": 128,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "d_model": 1280,
    "activation_function": "gelu",
    "max_source_positions": 1500,
}
_DECODER_WIDTH: Final = 4096
"""transformers' default if config.json has none, which is also that of the published checkpoint."""


def _complete(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section of the tower, with the width that its rows are projected to."""
    out = (config.get("text_config") or {}).get("hidden_size", _DECODER_WIDTH)
    return {**_DEFAULTS, **config["audio_config"], "output_dim": out}


def _processors(checkpoint: Checkpoint, tower: Mapping[str, Any]) -> Mapping[Modality, Processor]:
    """Both layouts are read: `preprocessor_config.json`, and `processor_config.json` of newer saves."""
    saved = checkpoint.json("processor_config.json")
    given = saved.get("feature_extractor") or checkpoint.json("preprocessor_config.json")
    if not given:
        raise CheckpointError("the checkpoint has no preprocessor_config.json")
    if given.get("sampling_rate", SAMPLE_RATE) != SAMPLE_RATE:
        raise CheckpointError(f"only sound of {SAMPLE_RATE} samples a second is supported")
    if given.get("dither") or given.get("do_normalize"):
        raise CheckpointError("a feature extractor with dither or do_normalize is not supported")
    clips = ClipProcessor(
        bands=int(given.get("feature_size", 80)),
        window=int(given.get("n_fft", 400)),
        hop=int(given.get("hop_length", 160)),
        seconds=int(given.get("chunk_length", 30)),
    )
    if clips.bands != tower["num_mel_bins"]:
        raise CheckpointError(
            f"the extractor's feature_size is {clips.bands}, and the tower takes {tower['num_mel_bins']}"
        )
    if clips.samples != 2 * clips.hop * tower["max_source_positions"]:
        raise CheckpointError("the extractor's chunk_length is not what the tower has positions for")
    return {Modality.AUDIO: clips}


QWEN2_AUDIO = Family(
    tower="encoder_service.models.qwen2_audio:Qwen2AudioTower",
    row_shape=lambda tower: (1, int(tower["output_dim"])),
    processors=_processors,
    parts=QWEN2_AUDIO_PARTS,
    complete=_complete,
)
