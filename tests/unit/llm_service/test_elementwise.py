"""Functions of each number alone, of which a token's last digits must not depend on its company."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from llm_service.layers import elementwise

FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "sigmoid": (elementwise.sigmoid, torch.sigmoid),
    "silu": (elementwise.silu, functional.silu),
    "softplus": (elementwise.softplus, functional.softplus),
    "gelu": (elementwise.gelu, lambda x: functional.gelu(x, approximate="tanh")),
}


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("width", [1, 17, 416])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_row_has_the_same_digits_in_any_company(name: str, dtype: torch.dtype, width: int) -> None:
    function, _ = FUNCTIONS[name]
    x = (3.0 * torch.randn(300, width, generator=torch.Generator().manual_seed(width))).to(dtype)
    alone = torch.cat([function(row) for row in x.split(1)])
    for count in (2, 5, 15, 33, 300):
        assert torch.equal(function(x[:count]), alone[:count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_are_torchs(name: str, dtype: torch.dtype) -> None:
    function, reference = FUNCTIONS[name]
    x = torch.cat([torch.linspace(-30.0, 30.0, 4001), torch.tensor([-1e4, -100.0, -0.0, 0.0, 100.0, 1e4])]).to(dtype)
    given = function(x)
    assert given.dtype == dtype
    expected = reference(x.double())
    torch.testing.assert_close(given.double(), expected, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=2e-6)
