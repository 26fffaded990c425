"""One token from each row of logits, as its `Draw` says, all rows of a step together; and how likely tokens were. In
transformers' order: penalties, bias, bans (its logits processors), temperature, top-k, top-p, min-p; then the draw by
inverse CDF at the plan's `uniform`, so that a token depends on its logits and its seed and on nothing else. These are
torch's operators; `gpu_sampler` draws the same tokens by kernels of ours."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from common.gpu.transfer import ToHost, to_device
from llm_service.plan import Draw, PromptLogprobsAsked, StepResult, TokenLogprobs

_ROWS_ON_GPU, _ROWS_ON_CPU = 64, 8
"""Rows drawn from at once: with 150 000 words each takes about 5 MB, and a CPU's cache should hold them."""

_REACH = (512, 8192)
"""Of how many values the order is found at first, and then."""

_PLACES = 128
"""Positions whose logits are held at once: with 150 000 words, about 80 MB of float32."""


class Drawn:
    """The tokens drawn: `tokens` int64 [len(draws)], on the device, and being copied to the host together with
    log-probabilities if asked for. These are of the model's own distribution: untouched `logits` at temperature 1."""

    def __init__(self, tokens: Tensor, logits: Tensor | None = None, draws: Sequence[Draw] = ()) -> None:
        self.tokens = tokens
        self._read = ToHost(tokens)
        self._likely: list[tuple[list[int], list[int], ToHost]] = []
        for part in _parts([index for index, draw in enumerate(draws) if draw.logprobs >= 0], tokens.device):
            assert logits is not None, "somebody asks how likely tokens are"
            (at,), tops = to_device([np.array(part)], logits.device), [draws[index].logprobs for index in part]
            values = logits[at].double().log_softmax(-1)
            self._likely.append((part, tops, ToHost(_likeliest(values, tokens[at], max(tops)))))

    def result(self) -> StepResult:
        """The same on the host; waits for it."""
        tokens: list[int] = self._read.read().tolist()
        found: list[TokenLogprobs | None] = [None] * len(tokens)
        for part, tops, likely in self._likely:
            for index, entry in zip(part, _entries(likely.read(), tops), strict=True):
                found[index] = entry
        return StepResult(tokens, found)


def draw(logits: Tensor, draws: Sequence[Draw], chosen: Tensor) -> Drawn:
    """float32 logits [len(draws), vocabulary] → one token for each draw, with log-probabilities if asked for.

    `chosen` int64 are the tokens of the step before, for draws that depend on one.
    """
    if any(draw.carried >= 0 for draw in draws):
        known = chosen.tolist()
        draws = [draw if draw.carried < 0 else draw.with_last(known[draw.carried]) for draw in draws]
    tokens = logits.argmax(-1)
    altered = [index for index, draw in enumerate(draws) if not draw.plain]
    for part in _parts(altered, logits.device):
        at = torch.tensor(part, device=logits.device)
        tokens[at] = _choose(logits[at], [draws[index] for index in part])
    return Drawn(tokens, logits, draws)


def _choose(rows: Tensor, draws: Sequence[Draw]) -> Tensor:
    """rows float32 [k, vocabulary], which are overwritten → int64 [k]."""
    _adjust(rows, draws)
    tokens = rows.argmax(-1)
    drawn = [index for index, draw in enumerate(draws) if draw.temperature > 0.0]
    if drawn:
        at = torch.tensor(drawn, device=rows.device)
        tokens[at] = _draw(rows[at], [draws[index] for index in drawn])
    return tokens


def _draw(rows: Tensor, draws: Sequence[Draw]) -> Tensor:
    """rows float32 [k, vocabulary] → int64 [k]."""
    asked = [(draw.temperature, draw.uniform) for draw in draws]
    temperature, uniform = torch.tensor(asked, dtype=torch.float64, device=rows.device).T.unsqueeze(-1)
    # From the highest down, in float64: a temperature near zero makes the others vanish, not overflow.
    values = rows.double().sub_(rows.amax(-1, keepdim=True)).div_(temperature)
    weights = values.exp()
    weights.masked_fill_(values < min_kept(values, weights, draws).unsqueeze(-1), 0.0)
    total = weights.cumsum(-1)
    whole = total[:, -1:].contiguous()
    # The first position at which the cumulative sum exceeds the share; if rounding leaves none, the last one that adds
    # to it.
    place = torch.searchsorted(total, uniform * whole, right=True)
    last = torch.searchsorted(total, whole).clamp_(max=rows.shape[1] - 1)  # a row that is not a number has none
    return torch.minimum(place, last).squeeze(-1)


def _adjust(rows: Tensor, draws: Sequence[Draw]) -> None:
    """Changes rows float32 [k, vocabulary] in place, each as its draw says: penalties, bias, a grammar's mask, bans."""
    _penalise(rows, draws)
    _add_bias(rows, draws)
    _mask(rows, draws)
    _ban(rows, draws)


def _penalise(rows: Tensor, draws: Sequence[Draw]) -> None:
    """Repetition penalty counts tokens of prompt and output alike; presence and frequency count the output alone."""
    if not any(draw.prompt or draw.output for draw in draws):
        return
    device, vocabulary = rows.device, rows.shape[1]
    flat = rows.view(-1)
    asked = _cells([draw.prompt for draw in draws], vocabulary).to(device)
    said, counts = _cells([draw.output for draw in draws], vocabulary).to(device).unique(return_counts=True)
    rates = [(draw.repetition_penalty, draw.presence_penalty, draw.frequency_penalty) for draw in draws]
    repetition, presence, frequency = torch.tensor(rates, device=device).T
    seen = torch.cat([asked, said])  # tokens in both get the same number twice
    number = torch.finfo(rows.dtype)
    scores, rate = flat[seen], repetition[seen // vocabulary].clamp_(min=number.tiny)
    flat[seen] = torch.where(scores < 0, scores * rate, scores / rate).clamp_(max=number.max)
    flat[said] -= presence[said // vocabulary] + frequency[said // vocabulary] * counts


def _cells(tokens: Sequence[bytes], vocabulary: int) -> Tensor:
    """int64 [tokens]: positions in the flattened rows of these tokens, int32 as bytes, one entry for each row."""
    cells = [np.frombuffer(some, np.int32).astype(np.int64) + row * vocabulary for row, some in enumerate(tokens)]
    return torch.from_numpy(np.concatenate(cells))


def _add_bias(rows: Tensor, draws: Sequence[Draw]) -> None:
    biased = [(index, token, value) for index, draw in enumerate(draws) for token, value in draw.logit_bias.items()]
    if biased:
        row, token, value = zip(*biased, strict=True)
        rows[list(row), list(token)] += torch.tensor(value, device=rows.device)


def _mask(rows: Tensor, draws: Sequence[Draw]) -> None:
    """A grammar's mask has a bit for each token, little-endian."""
    masked = [index for index, draw in enumerate(draws) if draw.allowed_mask]
    if not masked:
        return
    masks = [draws[index].allowed_mask for index in masked]
    assert len({len(mask) for mask in masks}) == 1, "masks of one length, or each would reach into others' rows"
    packed = torch.frombuffer(bytearray(b"".join(masks)), dtype=torch.uint8)
    octets = packed.view(len(masked), -1, 1).to(rows.device)
    bits = octets.bitwise_right_shift(torch.arange(8, dtype=torch.uint8, device=rows.device)).bitwise_and_(1)
    at = torch.tensor(masked, device=rows.device)
    rows[at] = rows[at].masked_fill_(bits.flatten(1)[:, : rows.shape[1]] == 0, -torch.inf)


def _ban(rows: Tensor, draws: Sequence[Draw]) -> None:
    banned = array("q", [index * rows.shape[1] + token for index, draw in enumerate(draws) for token in draw.banned])
    if banned:
        rows.view(-1)[torch.tensor(banned, device=rows.device)] = -torch.inf


def min_kept(values: Tensor, weights: Tensor, draws: Sequence[Draw]) -> Tensor:
    """values float64 [k, vocabulary], at most 0 with a maximum of 0 in each row, and their exponentials → bounds [k]:
    values below their row's bound cannot be drawn.

    As in transformers, top-k, top-p and min-p each apply to what the one before left, and tokens as likely as the last
    one kept stay. A bound needs only the highest values, in order; the whole vocabulary is sorted only if a row is so
    flat that these do not suffice.
    """
    bounds = torch.tensor([draw.min_p for draw in draws], dtype=torch.float64, device=values.device).log_()
    cut = [index for index, draw in enumerate(draws) if draw.top_p < 1.0 or 0 < draw.top_k < values.shape[1]]
    if cut:
        at = torch.tensor(cut, device=values.device)
        bounds[at] = torch.maximum(bounds[at], _cut(values[at], weights[at].sum(-1), [draws[index] for index in cut]))
    return bounds


def _cut(values: Tensor, mass: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The value of the last token that top-k and top-p keep in each row; `mass` [m] is the sum of all exponentials."""
    vocabulary = values.shape[1]
    asked = [(draw.top_k or vocabulary, draw.top_p) for draw in draws]
    top_k, top_p = torch.tensor(asked, dtype=torch.float64, device=values.device).T.unsqueeze(-1)
    bounds, left = torch.empty_like(mass), torch.arange(len(draws), device=values.device)
    for reach in (*(reach for reach in _REACH if reach < vocabulary), vocabulary):
        some = values[left]
        head = some.topk(reach).values if reach < vocabulary else some.sort(descending=True).values
        kept = _kept(head, mass[left].unsqueeze(-1), top_k[left], top_p[left], vocabulary)
        bounds[left] = head.gather(1, kept - 1).squeeze(1)
        left = left[(kept == reach).squeeze(1)]
        if reach == vocabulary or not len(left):
            break
    return bounds


def _kept(head: Tensor, mass: Tensor, top_k: Tensor, top_p: Tensor, vocabulary: int) -> Tensor:
    """How many of the highest values, in descending order [m, n], stay: int64 [m, 1]; n if more might."""
    weights, n = head.exp(), head.shape[1]
    last = head.gather(1, top_k.long().clamp_(max=n) - 1)
    within = (head >= last) | (top_k > n)
    mass = torch.where(top_k > n, mass, weights.masked_fill(~within, 0.0).sum(-1, keepdim=True))
    before = weights.cumsum(-1) - weights
    kept = (within & (before < top_p * mass)).sum(-1, keepdim=True).clamp_(min=1)
    return torch.where((top_k > n) & (top_k < vocabulary), n, kept)  # the total left by top-k is not known yet


def _parts(indices: list[int], device: torch.device) -> Iterator[list[int]]:
    size = _ROWS_ON_CPU if device.type == "cpu" else _ROWS_ON_GPU
    for first in range(0, len(indices), size):
        yield indices[first : first + size]


def prompt_logprobs(
    hidden: Tensor, every: list[PromptLogprobsAsked], logits: Callable[[Tensor], Tensor]
) -> list[list[TokenLogprobs]]:
    """The log-probabilities of prompt tokens: hidden [n, hidden] of a whole batch → one entry for each target of
    `every`.

    `logits` is [m, hidden] → float32 [m, vocabulary]. If a group computes it together, every rank must call this.
    """
    out: list[list[TokenLogprobs]] = []
    for asked in every:
        targets = torch.tensor(array("i", asked.targets).tolist(), device=hidden.device)
        found: list[TokenLogprobs] = []
        for first in range(0, len(targets), _PLACES):
            part = targets[first : first + _PLACES]
            places = hidden[asked.at + first : asked.at + first + len(part)]
            likely = _likeliest(logits(places).double().log_softmax(-1), part, asked.top)
            found.extend(_entries(likely.cpu(), [asked.top] * len(part)))
        out.append(found)
    return out


def _likeliest(values: Tensor, targets: Tensor, top: int) -> Tensor:
    """Log-probabilities float64 [m, vocabulary], targets int64 [m] → float64 [m, 1 + 2 · top]: for each row the
    target's, the highest ones, and their tokens."""
    highest = values.topk(top)
    return torch.cat([values.gather(1, targets.unsqueeze(1)), highest.values, highest.indices.double()], dim=1)


def _entries(likely: Tensor, tops: Sequence[int]) -> list[TokenLogprobs]:
    """Entries from the output of `_likeliest`, and how many each row wants."""
    width = likely.shape[1] // 2
    found = zip(likely[:, : 1 + width].tolist(), likely[:, 1 + width :].long().tolist(), tops, strict=True)
    return [TokenLogprobs.of(own, zip(tokens[:top], rest[:top], strict=True)) for (own, *rest), tokens, top in found]
