"""Loading the reference implementation beside a torch without torchvision's compiled operators."""

import importlib.util

import torch


def declare_operators() -> None:
    """Declare the two operators that torchvision's import expects, where no build of it provides them.

    The reference's processors use torchvision for resizing only, which needs neither. Call this before importing them.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in (
        "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    ):
        name = schema.split("(")[0]
        if not torch._C._dispatch_has_kernel(f"torchvision::{name}"):
            try:
                library.define(schema)
            except RuntimeError:
                continue
    KEPT.append(library)


KEPT: list[torch.library.Library] = []
