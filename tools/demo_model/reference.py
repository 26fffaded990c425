"""Loading the reference implementation beside a torch without torchvision's compiled operators."""

from functools import cache

import torch

_KEPT: list[torch.library.Library] = []


@cache
def prepare() -> None:
    """Call this before anything imports `transformers`, whose video processors want torchvision.

    That has no CPU build. Where its ordinary wheel stands beside a CPU torch, two compiled operators, whose absence
    keeps it from being imported, are declared; the processors call neither.
    """
    try:
        import torchvision  # type: ignore[import-untyped]  # noqa: F401
    except (ImportError, RuntimeError):  # none, or "operator torchvision::nms does not exist"
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)
