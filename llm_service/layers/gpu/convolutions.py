"""Launches of the convolutions that layers with states begin with, or are: of a token each of many sequences, and of
runs."""

from __future__ import annotations

import triton
from torch import Tensor

from llm_service.layers.gpu import gdn_kernels
from llm_service.layers.recurrent.backend import CHUNK
from llm_service.layers.recurrent.metadata import RecurrentMetadata

CHANNELS = 256
"""Channels of one token that a program takes."""
RUN_CHANNELS = 32
"""Channels of a tile of tokens that a program takes; twice as many would not fit into its registers."""


def convolve_steps(
    mixed: Tensor,
    given: Tensor,
    metadata: RecurrentMetadata,
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    silu: bool = True,
) -> None:
    """Convolves one token of each sequence that decodes: writes their rows of `mixed` [n, channels] from their rows of
    `given`, through SiLU if `silu`, and advances their states [slots, channels, width − 1]. weight [channels, width],
    bias [channels]."""
    channels, width = weight.shape
    gdn_kernels.conv_step_kernel[(len(metadata.steps), triton.cdiv(channels, CHANNELS))](
        mixed,
        given,
        metadata.steps,
        states,
        weight,
        weight if bias is None else bias,
        given.stride(0),
        channels,
        WIDTH=width,
        BLOCK=CHANNELS,
        BIAS=bias is not None,
        SILU=silu,
        num_warps=4,
    )


def convolve_runs(
    mixed: Tensor,
    given: Tensor,
    metadata: RecurrentMetadata,
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    silu: bool = True,
) -> None:
    """The same of runs, and of the copies of their states."""
    (channels, width), runs = weight.shape, metadata.runs
    gdn_kernels.conv_run_kernel[(len(metadata.tiles), triton.cdiv(channels, RUN_CHANNELS))](
        mixed,
        given,
        runs,
        metadata.tiles,
        states,
        weight,
        weight if bias is None else bias,
        given.stride(0),
        channels,
        WIDTH=width,
        TILE=CHUNK,
        BLOCK=RUN_CHANNELS,
        BIAS=bias is not None,
        SILU=silu,
        num_warps=4,
    )
    gdn_kernels.conv_keep_kernel[(len(runs), triton.cdiv(channels, CHANNELS))](
        given, runs, states, given.stride(0), channels, WIDTH=width, BLOCK=CHANNELS, num_warps=4
    )
