"""The training loop: losses, steps, savings. It knows nothing of command lines or of starting processes."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from tools.demo_model.batches import Batch, Maker
from tools.demo_model.hints import Hints, words
from tools.demo_model.net import Net, allowed, initialise
from tools.demo_model.optimise import Optimiser
from tools.demo_model.shape import ModelShape
from tools.demo_model.vision import whiten


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run was asked for."""

    folder: Path
    steps: int
    batch: int
    seed: int
    save_every: float
    ranks: int
    compiled: bool
    device: str
    falling: float
    minutes: float
    looking: int
    start: Path | None


def rate_at(step: int, done: float, falling: float) -> float:
    """Up over 60 steps, level, down to zero over the last share of the run; `done` is the share that is over."""
    return min(1.0, (step + 1) / 60, max(0.0, (1 - done) / falling))


def save(path: Path, state: dict[str, Any]) -> None:
    """Write beside, then rename: a killed run leaves the last whole state."""
    beside = path.with_suffix(".part")
    torch.save(state, beside)
    beside.replace(path)


def exported(checkpoint: Path) -> dict[str, Tensor]:
    """The weights of an exported checkpoint under the net's own names."""
    return {name.removeprefix("model."): w.float() for name, w in load_file(checkpoint / "model.safetensors").items()}


def sample(settings: Settings) -> Tensor:
    """Patches [n, 3 * 2 * 16 * 16] of some pictures, to set up the first layer by."""
    maker = Maker(settings.folder / "tokenizer.json", settings.seed + 1, 48)
    found = [maker[step].patches for step in range(12)]
    return torch.cat([patches.flatten(0, 1) for patches in found if patches is not None]).float() / 127.5 - 1


class Trainer:
    """The model, its optimiser and where they stand."""

    def __init__(self, settings: Settings, rank: int = 0) -> None:
        self.settings, self.rank = settings, rank
        named_tokens = words(Tokenizer.from_file(str(settings.folder / "tokenizer.json")))
        shape = ModelShape()
        self.net, self.hints = Net(shape), Hints(shape.vision.width, shape.text.width, named_tokens)
        initialise(self.net, settings.seed)
        self.path = settings.folder / "state.pt"
        if settings.start is not None:
            self.net.load_state_dict(exported(settings.start))
        elif not self.path.exists():
            whiten(self.net.visual.patch_embed, sample(settings))
        self.net.to(settings.device)
        self.hints.to(settings.device)
        self.average = {name: weight.detach().clone() for name, weight in self.net.state_dict().items()}
        named = [*self.net.named_parameters(), *self.hints.named_parameters()]
        self.parameters = [parameter for _, parameter in named]
        self.optimiser = Optimiser(named)
        self.step, self.done, self.begun = 0, 0.0, time.monotonic()
        if self.path.exists():
            self.load()
        if settings.compiled:
            self.net.language_model.compile(dynamic=False)  # its shapes never change; those of vision do

    def load(self) -> None:
        state = torch.load(self.path, map_location=self.settings.device, weights_only=True)
        self.net.load_state_dict(state["net"])
        self.hints.load_state_dict(state["hints"], strict=False)
        self.optimiser.load(state["optimiser"])
        self.average, self.step = state["average"], state["step"]
        self.begun -= state.get("seconds", 0.0)  # states of older runs do not know how long they took

    def keep(self) -> None:
        state = {
            "net": self.net.state_dict(), "hints": self.hints.state_dict(), "optimiser": self.optimiser.state(),
            "average": self.average, "step": self.step, "seconds": time.monotonic() - self.begun,
        }  # fmt: skip
        save(self.path, state)

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss on the answers, and that of the hints."""
        device = self.settings.device
        if self.step < self.settings.looking and batch.patches is not None:
            return torch.zeros((), device=device), self.seen(batch)[1]
        rows, hint = None, torch.zeros((), device=device)
        labels = batch.labels.flatten()
        wanted = (labels >= 0).nonzero().flatten().to(device)
        with torch.autocast(device, torch.bfloat16):
            if batch.patches is not None:
                rows, hint = self.seen(batch)
            logits, (early, late) = self.net.answer(
                batch.ids.to(device), batch.places.to(device), allowed(batch.branch.to(device)), batch.slots.to(device),
                rows, wanted,
            )  # fmt: skip
        hint = hint + self.hints.pointing(early, late, batch.points.to(device), batch.spots.to(device))
        if batch.alike > 1:
            assert batch.hints is not None
            seen = early[batch.slots.to(device)].view(batch.hints.shape[1], -1, early.shape[-1])
            hint = hint + self.hints.recalling(seen, batch.hints.to(device), batch.alike)
        return F.cross_entropy(logits.float(), labels.to(device)[wanted]), hint

    def seen(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The rows of a batch's pictures, and the loss of the hints on them."""
        assert batch.patches is not None
        assert batch.hints is not None
        device = self.settings.device
        pixels = batch.patches.to(device).float().mul_(1 / 127.5).sub_(1)
        with torch.autocast(device, torch.bfloat16):
            rows, hidden = self.net.see(pixels, batch.height // 16, batch.width // 16)
        place = self.hints.placing(rows[0], batch.height // 16, batch.width // 16)
        marks, table = batch.hints.to(device), self.net.language_model.embed_tokens.weight
        return rows, place + self.hints(hidden, marks) + self.hints.naming(rows[0], marks, table)

    def share(self, done: float) -> float:
        """The mean over all ranks, as one message, of the gradients and of `done`, which is returned."""
        if self.settings.ranks == 1:
            return done
        parts = [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in self.parameters]
        flat = torch.cat([*parts, torch.tensor([done])]).div_(self.settings.ranks)
        torch.distributed.all_reduce(flat)
        sizes = [p.numel() for p in self.parameters]
        for parameter, part in zip(self.parameters, flat[:-1].split(sizes), strict=True):
            parameter.grad = None if parameter.grad is None else part.view_as(parameter)
        return float(flat[-1])

    def train_step(self, batch: Batch) -> tuple[float, float]:
        """One step; the two losses. Clocks differ, so the ranks agree on how much of the run is over."""
        answer, hint = self.losses(batch)
        for parameter in self.parameters:
            parameter.grad = None
        (answer + 0.3 * hint).backward()
        minutes = (time.monotonic() - self.begun) / 60
        self.done = self.share(max((self.step + 1) / self.settings.steps, minutes / self.settings.minutes))
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimiser.step(rate_at(self.step, self.done, self.settings.falling))
        self.step += 1
        keep = min(0.998, 1 - 1 / (1 + self.step / 8))
        now = self.net.state_dict()
        torch._foreach_lerp_([self.average[name] for name in now], list(now.values()), 1 - keep)
        return answer.item(), hint.item()

    def run(self, report: Callable[[str], None] = print) -> None:
        settings = self.settings
        maker = Maker(settings.folder / "tokenizer.json", settings.seed, settings.batch // settings.ranks, self.rank)
        loader = DataLoader(
            maker, sampler=range(self.step, settings.steps), batch_size=None, num_workers=1, prefetch_factor=4
        )
        saved, means = time.monotonic(), [0.0, 0.0]
        progress = tqdm(
            loader, initial=self.step, total=settings.steps, mininterval=10, ascii=True, disable=self.rank > 0
        )
        for batch in progress:
            for k, loss in enumerate(self.train_step(batch)):
                means[k] += 0.03 * (loss - means[k]) if means[k] else loss
            progress.set_postfix_str(f"answers {means[0]:.3f} hints {means[1]:.3f}", refresh=False)
            if self.done >= 1:
                break
            if self.rank:
                continue
            if self.step % 100 == 0:
                report(f"step {self.step} answers {means[0]:.4f} hints {means[1]:.4f} at {time.strftime('%H:%M:%S')}")
            if time.monotonic() - saved > settings.save_every:
                self.keep()
                saved = time.monotonic()
        if self.done >= 1:  # the rate has fallen to zero: an average would only lag behind
            self.average = {name: weight.detach().clone() for name, weight in self.net.state_dict().items()}
        if self.rank == 0:
            self.keep()
