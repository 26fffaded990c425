"""The sampler on a GPU: the draws of `sampler`, without a question to the device on the way. All that draws say goes
over in one copy, the tokens come back in one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import triton
from torch import Tensor

from common.gpu.transfer import to_device
from llm_service.layers.gpu.sampling_kernels import ADJUST, DRAW, HEAD, adjust_kernel, draw_kernel
from llm_service.plan import Draw
from llm_service.worker.sampler import Drawn

_SEEN = 1 << 30
"""Marks a token of the prompt in a count of output tokens."""
_SHARPEST = 1e30
"""One over the least temperature: all but the likeliest vanish, and nothing overflows."""
_BLOCK = 4096
_TOKEN = 4
"""Bytes of a token's number."""
_NUMBER = torch.finfo(torch.float32)


def draw(logits: Tensor, draws: Sequence[Draw], chosen: Tensor) -> Drawn:
    """float32 logits [len(draws), vocabulary], whose rows may be strided → one token for each draw; see `sampler.draw`.

    The number of launches does not depend on the number of rows.
    """
    vocabulary = logits.shape[1]
    altered = [index for index, draw in enumerate(draws) if draw.alters]
    drawn = [index for index, draw in enumerate(draws) if draw.temperature > 0.0]
    cut = [index for index in drawn if _is_cut(draws[index], vocabulary)]
    uncut = [index for index in drawn if not _is_cut(draws[index], vocabulary)]
    adjustments, choices = _adjustments(draws, altered, vocabulary), _choices(draws, [*uncut, *cut], vocabulary)
    there = to_device([*adjustments, *choices], logits.device) if altered or drawn else []
    scores = logits
    if altered:
        scores = logits.clone()
        asked = sum(len(draws[index].prompt) for index in altered) // _TOKEN
        _adjust(scores, chosen, asked, *there[: len(adjustments)])
    whole = len(cut) == len(draws)
    tokens = logits.new_empty(len(draws), dtype=torch.int64) if whole else scores.argmax(-1)
    if drawn:
        at, table = there[len(adjustments) :]
        if uncut:
            here = at[: len(uncut)]
            places = tokens[here, None]
            _choose(tokens, scores, (scores[here[:, None], places], places), table[: len(uncut)])
        if cut:
            rows = scores if whole else scores[at[len(uncut) :]]
            _choose(tokens, scores, rows.topk(min(HEAD, vocabulary)), table[len(uncut) :])
    return Drawn(tokens, logits, draws)


def _is_cut(draw: Draw, vocabulary: int) -> bool:
    """Whether a row's highest values may hold all that may be drawn; else only its highest is looked for."""
    return vocabulary <= HEAD or bool(draw.top_k) or draw.top_p < 1.0 or draw.min_p > 0.0


def _adjustments(draws: Sequence[Draw], altered: Sequence[int], vocabulary: int) -> tuple[np.ndarray, ...]:
    """The arguments of `_adjust`."""
    table = np.full((len(altered), ADJUST), -1.0)
    asked, said, masks = list[bytes](), list[bytes](), list[np.ndarray]()
    carried, length = list[tuple[int, int]](), 0
    cells, values, pairs = list[int](), list[float](), list[tuple[int, int, int]]()
    for own, index in zip(table, altered, strict=True):
        draw = draws[index]
        repetition = max(_NUMBER.tiny, draw.repetition_penalty)
        own[[0, 3, 4, 5]] = index, repetition, draw.presence_penalty, draw.frequency_penalty
        if draw.prompt or draw.output:
            own[1] = len(asked)
            asked.append(draw.prompt)
            said.append(draw.output)
            length += len(draw.output) // _TOKEN
            if draw.carried >= 0:
                carried.append((length - 1, draw.carried))
        if draw.allowed_mask:
            own[2] = len(masks)
            masks.append(np.frombuffer(draw.allowed_mask, np.uint8))
        cells += [index * vocabulary + token for token in (*draw.logit_bias, *draw.banned)]
        values += [*draw.logit_bias.values(), *([-math.inf] * len(draw.banned))]
        pairs += [(draw.carried, first, index * vocabulary + second) for first, second in draw.banned_behind]
    seen = np.frombuffer(b"".join([*asked, *said]), np.int32)
    bases = np.tile(np.arange(len(asked), dtype=np.int64) * vocabulary, 2)
    runs = np.stack([np.array([len(each) // _TOKEN for each in (*asked, *said)], np.int64), bases])
    packed = np.stack(masks) if masks else np.empty((0, 0), np.uint8)
    unknown, behind = np.array(carried, np.int64).reshape(-1, 2).T, np.array(pairs, np.int64).reshape(-1, 3).T
    return (table, seen, runs, unknown, packed, np.array(cells, np.int64), np.array(values, np.float32), behind)


def _adjust(
    scores: Tensor,
    chosen: Tensor,
    asked: int,
    table: Tensor,
    seen: Tensor,
    runs: Tensor,
    unknown: Tensor,
    masks: Tensor,
    cells: Tensor,
    values: Tensor,
    behind: Tensor,
) -> None:
    """Changes scores float32 [m, vocabulary] in place. `table` is that of `adjust_kernel`. `seen` int32 are the tokens
    to count: those of all prompts, `asked` of them, then those of all outputs. `runs` int64 [2, 2 · rows]: how many of
    each row, and where its counts begin. `values` are added at positions `cells` of the scores. `unknown` int64 [2, u]:
    which output tokens are unknown, and which of `chosen` each is. `behind` int64 [3, b]: if this token of `chosen` is
    that one, the score at this position is banned."""
    vocabulary = scores.shape[1]
    counts = table.new_empty(0, dtype=torch.int32)
    if len(seen):
        counts = counts.new_zeros(len(table) * vocabulary)
        if unknown.shape[1]:
            places, draws = unknown
            seen[asked:].index_copy_(0, places, chosen[draws].to(seen.dtype))
        many, bases = runs
        cells_seen = seen + bases.repeat_interleave(many, output_size=len(seen))
        counts.index_fill_(0, cells_seen[:asked], _SEEN)
        counts.scatter_add_(0, cells_seen[asked:], counts.new_ones(1).expand(len(seen) - asked))
    if len(counts) or len(masks):
        adjust_kernel[(len(table), triton.cdiv(vocabulary, _BLOCK))](
            scores,
            table,
            counts,
            masks,
            scores.stride(0),
            vocabulary,
            masks.shape[1],
            LARGEST=_NUMBER.max,
            SEEN=_SEEN,
            BLOCK=_BLOCK,
            num_warps=8,
        )
    if len(cells):
        scores.view(-1).scatter_add_(0, cells, values)
    if behind.shape[1]:
        draws, tokens, places = behind
        bans = torch.where(chosen[draws] == tokens, -math.inf, 0.0)
        scores.view(-1).scatter_add_(0, places, bans.to(scores.dtype))


def _choices(draws: Sequence[Draw], drawn: Sequence[int], vocabulary: int) -> tuple[np.ndarray, ...]:
    """The rows to draw from, and what `draw_kernel` must know of each."""
    table = np.empty((len(drawn), DRAW))
    for own, index in zip(table, drawn, strict=True):
        draw = draws[index]
        sharpness = min(_SHARPEST, 1.0 / draw.temperature)
        least = math.log(draw.min_p) if draw.min_p else -math.inf
        own[:] = index, sharpness, draw.uniform, min(draw.top_k or vocabulary, vocabulary), draw.top_p, least
    return np.array(drawn, np.int64), table


def _choose(tokens: Tensor, scores: Tensor, head: tuple[Tensor, Tensor], table: Tensor) -> None:
    """Draws a token for each row of scores float32 [m, vocabulary] that the table names, into that position of
    `tokens`. `head` are the highest values of these rows in descending order, and their tokens int64, [k, highest]."""
    vocabulary, (values, places) = scores.shape[1], head
    draw_kernel[(len(table),)](
        tokens,
        scores,
        values,
        places,
        table,
        scores.stride(0),
        vocabulary,
        values.shape[1],
        COUNT=HEAD,
        BITS=vocabulary.bit_length(),
        BLOCK=_BLOCK,
        num_warps=8,
    )
