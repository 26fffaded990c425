"""Training progress: `python -m tools.demo_model.probe` evaluates the saved state on unseen scenes in a minute.

An answer counts as right if every one of its tokens is the most likely after the right ones before it, which is when
greedy decoding gives that answer. So one pass evaluates a whole sequence of questions. Published figures come from
`evaluate`, which decodes through the reference or the services.
"""

import argparse
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from tools.demo_model.batches import Batch, Maker
from tools.demo_model.net import Net, allowed
from tools.demo_model.places import cache, saved
from tools.demo_model.shape import ModelShape

FAR = 10_000_000


@torch.no_grad()
def likeliest(net: Net, batch: Batch) -> Tensor:
    """The likeliest next token at every position [batch, length]."""
    rows = None
    if batch.patches is not None:
        rows, _ = net.see(batch.patches.float() / 127.5 - 1, batch.height // 16, batch.width // 16)
    wanted = torch.arange(batch.ids.numel())
    logits, _ = net.answer(batch.ids, batch.places, allowed(batch.branch), batch.slots, rows, wanted)
    return logits.argmax(-1).view(batch.ids.shape)


def shares(net: Net, maker: Maker, batches: int) -> dict[str, tuple[int, int]]:
    """(right, asked) by kind over `batches` batches that no training run reaches."""
    right, asked = Counter[str](), Counter[str]()
    for step in range(FAR, FAR + batches):
        batch = maker[step]
        best = likeliest(net, batch)
        for k, answers in enumerate(batch.answers):
            for kind, start, end in answers:
                # The first token of an answer is predicted by the last token of the header before it.
                good = bool((best[k, start - 1 : end - 1] == batch.ids[k, start:end]).all())
                asked[kind] += 1
                right[kind] += good
    return {kind: (right[kind], asked[kind]) for kind in sorted(asked)}


def main() -> None:
    """Measure the saved state."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo_model.probe", description=__doc__)
    parser.add_argument("--cache", type=Path, default=cache(), help="folder of the training state")
    parser.add_argument("--batches", type=int, default=24, help="of scenes (default: %(default)s)")
    parser.add_argument("--now", action="store_true", help="the weights of the last step instead of their average")
    args = parser.parse_args()
    state = saved(args.cache)
    net = Net(ModelShape())
    net.load_state_dict(state["net" if args.now else "average"])
    found = shares(net, Maker(args.cache / "tokenizer.json", 77, 24), args.batches)
    print(f"step {state['step']}")
    for kind, (good, number) in found.items():
        print(f"{kind:12} {100 * good / number:5.1f} %  of {number}")


if __name__ == "__main__":
    main()
