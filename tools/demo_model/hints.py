"""Auxiliary losses: what each patch shows; a name and a position for each row; the position of what is named.

Names teach the decoder early to attend to rows: a row must lie near the embeddings of the words for what its patches
show, so that a word in a question finds its row by similarity, and a row's content can be copied. Positions teach it
to compare: otherwise rows contain nothing about their position, and rotary keys alone teach that very slowly. The
decoder has tasks of its own: early, a thing's name must predict the thing's position, and a row what the previous
picture or frame showed there; later, the token before a name in an answer must predict the position of the thing to be
named. Characters of a text are trained like names: without that, the second of two equal ones was left out, and
neighbours were swapped. None of this is exported.
"""

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from tools.demo_model.marks import NONE
from tools.demo_model.vision import patch_order
from tools.demo_model.words import CHARACTERS, COLOURS, SHAPES

SIZES = (len(SHAPES), len(COLOURS), len(CHARACTERS))


def words(tokenizer: Tokenizer) -> list[int]:
    """The tokens of all shapes, colours and characters, in the order of their marks; each is one token."""
    names = [*(f" {name}" for name in (*SHAPES, *COLOURS)), *CHARACTERS]
    return [tokenizer.encode(name).ids[0] for name in names]


class Hints(nn.Module):
    """Linear heads on patches [width] and on rows [text], and the comparison of rows with words."""

    def __init__(self, width: int, text: int, tokens: list[int]) -> None:
        super().__init__()
        self.tokens = tokens
        self.norm = nn.LayerNorm(width)
        self.heads = nn.ModuleList(nn.Linear(width, size + more) for size, more in zip(SIZES, (2, 0, 1), strict=True))
        self.place = nn.Linear(text, 2)
        self.spot = nn.Linear(text, 2)
        self.before = nn.Linear(text, sum(SIZES))
        self.next = nn.Linear(text, 2)

    def forward(self, hidden: Tensor, marks: Tensor) -> Tensor:
        """hidden [segments, patches, width], marks [4, segments, patches]: the sum of the losses on the first three.

        Most patches show nothing, so those that show something are counted once more by themselves.
        """
        x, total = self.norm(hidden.float()).flatten(0, 1), hidden.new_zeros((), dtype=torch.float32)
        for head, mark, size in zip(self.heads, marks[:3].flatten(1), SIZES, strict=True):
            scores = head(x)
            for counted in (mark != NONE, (mark >= 0) & (mark < size)):
                if counted.any():
                    total = total + F.cross_entropy(scores[counted], mark[counted])
        return total

    def naming(self, rows: Tensor, marks: Tensor, table: Tensor) -> Tensor:
        """How far rows [segments, rows, width] are from the words for what their four patches show.

        marks [4, segments, 4 * rows]; table [vocabulary, width] are the embeddings.
        """
        return telling(F.rms_norm(rows.float(), rows.shape[-1:]) @ table[self.tokens].detach().float().T - 4, marks)

    def placing(self, rows: Tensor, height: int, width: int) -> Tensor:
        """How badly rows [segments, rows, text] of pictures of height x width patches tell where they stand."""
        down, across = (order.view(-1, 4)[:, 0] // 2 for order in patch_order(height, width, 2))
        wanted = torch.stack(((down + 0.5) / (height // 2), (across + 0.5) / (width // 2)), dim=-1).to(rows.device)
        given = self.place(F.rms_norm(rows.float(), rows.shape[-1:]))
        return 20 * F.mse_loss(given, wanted.expand_as(given))

    def pointing(self, early: Tensor, late: Tensor, points: Tensor, spots: Tensor) -> Tensor:
        """How badly hidden states [positions, text] tell the `spots` [n, 2] of things.

        points [2, n] are flat indices: of a thing's name, told early, and of the token before the name in an answer,
        told late; -1 where the name stands in a question.
        """
        found, answered = points[0], points[1] >= 0
        if not len(found):
            return early.new_zeros((), dtype=torch.float32)
        loss = F.mse_loss(self.spot(F.rms_norm(early[found].float(), early.shape[-1:])), spots)
        if answered.any():
            given = self.next(F.rms_norm(late[points[1, answered]].float(), late.shape[-1:]))
            loss = loss + F.mse_loss(given, spots[answered])
        return 20 * loss

    def recalling(self, early: Tensor, marks: Tensor, pictures: int) -> Tensor:
        """How badly rows tell what the picture before them showed where they stand.

        early [segments, rows, text] are the hidden states at the rows of `pictures` pictures for each sequence, marks
        [4, segments, 4 * rows] what these show.
        """
        later = early.unflatten(0, (-1, pictures))[:, 1:].flatten(0, 1)
        shown = marks.unflatten(1, (-1, pictures))[:, :, :-1].flatten(1, 2)
        return telling(self.before(F.rms_norm(later.float(), later.shape[-1:])) - 4, shown)


def telling(scores: Tensor, marks: Tensor) -> Tensor:
    """How badly scores [segments, rows, names] tell what each row's four patches show: marks [4, segments, patches].

    A row may show several things, or none; where a patch of it is unclear, only what it surely shows counts.
    """
    cells = marks.unflatten(-1, (-1, 4))
    whole = (cells != NONE).all(dim=-1, keepdim=True).float()
    loss, first = scores.new_zeros(()), 0
    seen = cells[0], cells[1], torch.cat((cells[2], cells[3]), dim=-1)
    for cell, size, known in zip(seen, SIZES, (whole[0], whole[0], whole[2]), strict=True):
        named = torch.where((cell >= 0) & (cell < size), cell, size)
        there = F.one_hot(named, size + 1).amax(dim=2)[..., :size].float()
        counted = torch.maximum(there, known)  # a patch without a thing has no colour, so its shape decides
        mine = scores[..., first : first + size]
        error = F.binary_cross_entropy_with_logits(mine, there, counted, reduction="sum")
        loss, first = loss + error / there.sum().clamp(min=1), first + size
    return loss
