"""The process that asks transformers' processor for items' layouts in prompts: `python -m
encoder_service.worker.planner SOCKET_FD`. It gets sizes, and never the content that somebody has sent."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.checkpoints.checkpoint import CheckpointError
from common.hf.processors import Clip, Sound
from common.process.parent_link import ParentLink, die_with_parent, leave_signals_to_parent
from encoder_service.media.messages import (
    ChooseFrames,
    Chosen,
    PlanItem,
    Planned,
    PlannerSettings,
    PlannerStartFailed,
    Ready,
    Refused,
    ToPlanner,
    WrongLength,
)
from encoder_service.models.processor import ItemProcessor, SoundLengthError

_THREADS = 1


def main(link_fd: int) -> None:
    """Answers until the parent is gone."""
    die_with_parent()
    leave_signals_to_parent()
    torch.set_num_threads(_THREADS)
    link: ParentLink[Any] = ParentLink(link_fd, ToPlanner)
    settings = link.receive()
    assert isinstance(settings, PlannerSettings)
    try:
        processor = ItemProcessor(Path(settings.folder))
    except CheckpointError as error:
        link.send(PlannerStartFailed(str(error)))
        return
    link.send(Ready())
    while True:
        try:
            asked = link.receive()
        except EOFError:
            return
        link.send(_answer(processor, asked))


def _answer(processor: ItemProcessor, asked: ChooseFrames | PlanItem) -> Chosen | Planned | WrongLength | Refused:
    try:
        if isinstance(asked, ChooseFrames):
            return Chosen(processor.frames(asked.total, asked.fps, asked.wanted))
        silence = np.zeros(asked.samples, np.float32)
        if not asked.frames:
            blank = np.zeros((asked.height, asked.width, 3), np.uint8)
            return Planned(processor.replacement(Sound(silence) if asked.samples else blank))
        blanks = np.zeros((len(asked.frames), asked.height, asked.width, 3), np.uint8)
        clip = Clip(blanks, asked.frames, asked.total, asked.fps, silence if asked.samples else None, asked.wanted)
        parts = processor.replacement(clip)
        return Planned(parts, processor.turns(parts) if asked.samples else ())
    except SoundLengthError as error:
        return WrongLength(error.too_long)
    except ValueError as error:
        return Refused(str(error))


if __name__ == "__main__":
    main(int(sys.argv[1]))
