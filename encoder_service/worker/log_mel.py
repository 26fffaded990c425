"""From samples to log-mel frames, on the worker's device, equal to the Whisper feature extractor's: the power of each
mel band in windows of a fixed step, its logarithm held to eight powers of ten below the loudest."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from encoder_service.families.qwen2_audio import ClipProcessor
from encoder_service.item import SAMPLE_RATE
from encoder_service.worker.pixel_ring import kept_there

_TOP = SAMPLE_RATE / 2
_LINEAR, _LINEAR_TOP = 200 / 3, 1000.0
"""Slaney's mel scale: up to 1 kHz each mel is a constant number of hertz, above it 27 mels are a factor of 6.4."""
_STEP = np.log(6.4) / 27


def preprocess(pixels: Tensor, size: tuple[int, int], processor: ClipProcessor) -> Tensor:
    """The `Preprocess` of clips: frames [2 · positions + 1, bands] float32 of samples [1, 1, n, 4] uint8, which are
    float32; `size` is (1, n).

    The last frame is what the tower's convolutions see behind the last position; behind the longest clip, zeros.
    """
    samples = pixels.reshape(-1).view(torch.float32)
    frames = -(-size[1] // processor.hop)
    wanted = 2 * ((frames - 1) // 2 + 1) + 1
    logarithms = log_mel(samples, wanted, processor)
    return F.pad(logarithms, (0, 0, 0, wanted - len(logarithms)))


def log_mel(samples: Tensor, wanted: int, processor: ClipProcessor) -> Tensor:
    """The first `wanted` frames [wanted, bands] of a clip, or as many as the longest one has.

    The reference pads every clip with silence to the longest length. Here as much silence is added as the windows of
    these frames see, and two more, which is enough for the maximum.
    """
    window, hop = processor.window, processor.hop
    length = min(hop * wanted + 2 * window, processor.samples)
    padded = F.pad(samples, (0, length - len(samples)))
    hann, bands = _tables(processor.bands, window, samples.device)
    spectrum = torch.stft(padded, window, hop, window=hann, return_complex=True)
    power = (spectrum[:, : processor.samples // hop].abs() ** 2).contiguous()
    found = (bands.T @ power).clamp(min=1e-10).log10()
    found = torch.maximum(found, found.max() - 8.0)
    return ((found + 4.0) / 4.0)[:, :wanted].T.contiguous()


@lru_cache(maxsize=4)
def _tables(bands: int, window: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Hann's window [window], and the mel bands, kept on the device."""
    made = torch.hann_window(window), torch.from_numpy(mel_bands(bands, window))
    return kept_there(made[0], device), kept_there(made[1], device)


def mel_bands(bands: int, window: int) -> np.ndarray:
    """How much each frequency of a spectrum counts in each band, [1 + window / 2, bands] float32: triangles between
    places that are equally far apart in mels, each of the same area (M. Slaney, Auditory Toolbox, 1998)."""
    tops = np.linspace(0.0, _mels(_TOP), bands + 2)
    edges = np.where(
        tops < _LINEAR_TOP / _LINEAR, tops * _LINEAR, _LINEAR_TOP * np.exp(_STEP * (tops - _LINEAR_TOP / _LINEAR))
    )
    frequencies = np.linspace(0.0, _TOP, 1 + window // 2)[:, None]
    rising = (frequencies - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - frequencies) / (edges[2:] - edges[1:-1])
    triangles: np.ndarray = np.maximum(0.0, np.minimum(rising, falling)) * 2.0 / (edges[2:] - edges[:-2])
    return triangles.astype(np.float32)


def _mels(hertz: float) -> float:
    """Above 1 kHz."""
    return float(_LINEAR_TOP / _LINEAR + np.log(hertz / _LINEAR_TOP) / _STEP)
