"""transformers' text model out of a checkpoint, once it has been tried in small."""

from __future__ import annotations

from typing import Any

import torch

from common.checkpoints.checkpoint import Checkpoint
from common.hf.classes import complete, load, speaking
from common.hf.description import HfModel
from common.telemetry import log
from llm_service.layers.attention.backend import MakesBackend
from llm_service.layers.tensor_parallel import ALONE, TensorGroup
from llm_service.models.hf.decoder import HfDecoder
from llm_service.models.hf.linear import Fill, fill_quantised, leave_quantised, round_linears
from llm_service.models.hf.text import text_alone
from llm_service.models.quantization_config import Scheme
from llm_service.models.quantized import check_weight_dtype
from llm_service.models.trial import Finding, try_out

_log = log.get("hf_loader")


def load_hf_decoder(
    checkpoint: Checkpoint,
    hf: HfModel,
    dtype: torch.dtype,
    device: torch.device,
    group: TensorGroup = ALONE,
    finding: Finding | None = None,
    *,
    weight_dtype: str = "",
    attention: str | MakesBackend = "auto",
) -> HfDecoder:
    """Reads the weights of the text alone, and keeps this rank's partition. `finding` None: its trial is made first.
    `weight_dtype` int8 rounds the matrices of its linear layers and of the head, and w8a8 the inputs of the layers' as
    well; `attention` as in `HfDecoder`. Raises CheckpointError if transformers or we cannot serve it like this."""
    scheme = Scheme.of(checkpoint.config)
    check_weight_dtype(weight_dtype, scheme, device)
    found = finding or try_out(checkpoint.folder, group.on_hosts())
    names: dict[str, str] = {}

    def strip(model: Any) -> None:
        text_alone(model)
        if scheme is not None:
            names.update(leave_quantised(checkpoint, model))

    # A weight that is to be cut or rounded may be larger than the device.
    at_once = group.size == 1 and not weight_dtype
    model = load(checkpoint.folder, strip, dtype, device if at_once else torch.device("cpu"))
    fill: Fill | None = None
    if weight_dtype:
        fill = round_linears(model, device, weight_dtype)
    elif names:
        _log.info("weights stay as they are quantised", method="" if scheme is None else scheme.method)
        fill = fill_quantised(checkpoint, names, device)
    return HfDecoder(
        speaking(complete(model)),
        dtype,
        device,
        axes=hf.axes,
        spans=found.spans,
        together=hf.together,
        adds_rows=found.adds_rows,
        group=group,
        fill=fill,
        attention=attention,
    )
