"""States of transformers' layers over our slots: whatever is in one batch, and how a sequence is cut."""

from __future__ import annotations

import torch
from torch import Tensor

from llm_service.layers.cache_spec import Segment
from llm_service.models.hf.states import Held, HfStates

CPU = torch.device("cpu")
CHANNELS, WIDTH = 3, 2


def compute(hidden: Tensor, held: Held) -> Tensor:
    """As a layer of transformers does it: a sum over the last tokens, and one over all."""
    tokens = hidden.transpose(1, 2)
    every = held.update_conv_state(tokens, 0, conv_kernel_size=WIDTH)
    last = every[..., 1:] + every[..., :-1]
    before = held.get_recurrent_state(0)
    sums = tokens.cumsum(-1) + (0.0 if before is None else before)
    held.update_recurrent_state(sums[..., -1:], 0)
    return (last[..., -tokens.shape[-1] :] + 10.0 * sums).transpose(1, 2)


def test_a_state_is_as_a_layer_first_says_it() -> None:
    compute(torch.ones(1, 1, CHANNELS), held := Held())
    spec = held.spec(64)
    assert [shape for shape, _ in spec.tensors] == [(CHANNELS, WIDTH), (CHANNELS, 1)]
    assert spec.chunk == 64


def test_sequences_go_on_from_their_own_states_and_leave_copies() -> None:
    one, other = torch.randn(1, 9, CHANNELS), torch.randn(1, 4, CHANNELS)
    compute(one[:, :1], first := Held())
    cache = first.spec(1).new_cache(5, CPU)
    for each in cache.tensors:
        each.fill_(torch.nan)
    steps = [
        [Segment(0, 3, 2, fresh=True, copy=4), Segment(3, 5, 2, fresh=False), Segment(5, 6, 0, fresh=True)],
        [Segment(0, 1, 0, fresh=False), Segment(1, 2, 2, fresh=False)],
        [Segment(0, 3, 2, fresh=False), Segment(3, 5, 0, fresh=False)],
    ]
    fed = [(one[:, :5], other[:, :1]), (other[:, 1:2], one[:, 5:6]), (one[:, 6:], other[:, 2:])]
    made = [
        HfStates().batch(segments).carry(compute, torch.cat(given, dim=1), cache)
        for segments, given in zip(steps, fed, strict=True)
    ]
    ones = torch.cat([made[0][:, :5], made[1][:, 1:], made[2][:, :3]], dim=1)
    others = torch.cat([made[0][:, 5:], made[1][:, :1], made[2][:, 3:]], dim=1)
    torch.testing.assert_close(ones, compute(one, Held()))
    torch.testing.assert_close(others, compute(other, Held()))
    again = HfStates().batch([Segment(0, 6, 4, fresh=False)]).carry(compute, one[:, 3:], cache)
    torch.testing.assert_close(again, compute(one, Held())[:, 3:])
