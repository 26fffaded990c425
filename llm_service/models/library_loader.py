"""The library's text model out of a checkpoint, once it has been tried in small."""

from __future__ import annotations

import torch

from common.checkpoint import Checkpoint, CheckpointError
from common.library import LibraryModel
from common.library_classes import load
from llm_service.layers.group import ALONE, TensorGroup
from llm_service.models.library_decoder import LibraryDecoder, text_alone
from llm_service.models.quantized import quantization_of
from llm_service.models.trial import Finding, try_out


def load_library_decoder(
    checkpoint: Checkpoint,
    library: LibraryModel,
    dtype: torch.dtype,
    device: torch.device,
    group: TensorGroup = ALONE,
    finding: Finding | None = None,
) -> LibraryDecoder:
    """Reads the text's weights alone, and keeps this rank's share of them; None: its trial has yet to be made. Raises
    CheckpointError where the library cannot, or we cannot serve it so."""
    if method := quantization_of(checkpoint.config):
        raise CheckpointError(f"quantised weights ({method}) are not for a model that the library computes")
    found = finding or try_out(checkpoint.folder, group.on_hosts())
    # What is to be cut may be more than a device holds.
    model = load(checkpoint.folder, text_alone, dtype, device if group.size == 1 else torch.device("cpu"))
    return LibraryDecoder(
        model,
        dtype,
        device,
        axes=library.axes,
        spans=found.spans,
        together=library.together,
        adds_rows=found.adds_rows,
        group=group,
    )
