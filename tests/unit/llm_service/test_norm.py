"""The one-pass norm for CPUs gives what torch's own gives."""

from __future__ import annotations

import pytest
import torch

from llm_service.layers.norm import RMSNorm


@pytest.mark.parametrize("shape", [(1, 64), (5, 64), (3, 4, 32), (300, 128), (200, 3, 128), (0, 64)])
def test_every_shape_gives_the_plain_norm(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(shape[-1], 1e-6, torch.float32)
    norm.weight.copy_(torch.randn(shape[-1], generator=generator))
    x = 3 * torch.randn(shape, generator=generator)
    expected = torch.nn.functional.rms_norm(x, norm.weight.shape, norm.weight, 1e-6)
    torch.testing.assert_close(norm(x), expected, rtol=2e-6, atol=2e-6)


def test_a_part_of_a_wider_tensor_is_read_where_it_lies() -> None:
    wide = torch.randn(6, 8, 32, generator=torch.Generator().manual_seed(1))
    norm = RMSNorm(32, 1e-6, torch.float32)
    norm.weight.fill_(1.0)
    part = wide[:, 2:5]
    torch.testing.assert_close(norm(part), norm(part.contiguous()), rtol=2e-6, atol=2e-6)
