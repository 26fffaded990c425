"""Train the demo model on scenes generated on the fly: `python -m tools.demo_model.train`.

The state (weights, their running average, optimiser, step) is kept in the cache folder and replaced atomically every
few minutes, so a run may be stopped at any time and resumes from there. The learning rate is constant and decays to
zero over the last part of the steps; a run restarted with another number of steps follows the new schedule from its
current step.

On a CPU each core runs its own rank with one thread, and gradients are summed once a step: on a shared machine this is
several times faster than threads that wait for each other thousands of times a step.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed
from tqdm import tqdm

from tools.demo_model import tokens
from tools.demo_model.places import cache
from tools.demo_model.trainer import Settings, Trainer


def work(rank: int, settings: Settings, meeting: str) -> None:
    """One rank, from start to end."""
    if settings.device == "cpu":
        torch.set_num_threads(1)
    torch.manual_seed(settings.seed)
    if settings.ranks > 1:
        torch.distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=settings.ranks)
    Trainer(settings, rank).run(report=tqdm.write)


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo_model.train", description=__doc__)
    parser.add_argument("--cache", type=Path, default=cache(), help="folder of the training state")
    parser.add_argument("--steps", type=int, default=14000, help="in all (default: %(default)s)")
    minutes = "end after this time of training, over all starts (default: %(default)g)"
    parser.add_argument("--minutes", type=float, default=240.0, help=minutes)
    falling = "share of the run in which the learning rate decays (default: %(default)g)"
    parser.add_argument("--falling", type=float, default=0.35, help=falling)
    looking = "first steps, which train the vision part alone (default: %(default)s)"
    parser.add_argument("--looking", type=int, default=3700, help=looking)
    parser.add_argument("--start", type=Path, help="start from this checkpoint's weights, if no state is saved")
    parser.add_argument("--batch", type=int, default=48, help="pictures of a step (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of weights and scenes (default: %(default)s)")
    parser.add_argument("--save-every", type=float, default=120.0, help="seconds between saves (default: %(default)g)")
    parser.add_argument("--no-compile", action="store_true", help="do not compile the net with torch.compile")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, help="cpu or cuda (default: cuda if there is a GPU)")
    parser.add_argument(
        "--ranks", type=int, help="processes that share a batch (default: one for each core, one on a GPU)"
    )
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    ranks = args.ranks or (1 if args.device != "cpu" else os.cpu_count() or 1)
    args.start = None if (args.cache / "state.pt").exists() else args.start
    if not (args.cache / "tokenizer.json").exists():
        if args.start is not None:
            shutil.copyfile(args.start / "tokenizer.json", args.cache / "tokenizer.json")
        else:
            tokens.build().save(str(args.cache / "tokenizer.json"))
    settings = Settings(
        args.cache, args.steps, args.batch, args.seed, args.save_every, ranks, not args.no_compile, args.device,
        args.falling, args.minutes, args.looking, args.start,
    )  # fmt: skip
    if args.rank is not None or ranks == 1:
        work(args.rank or 0, settings, args.meeting)
        return
    with tempfile.TemporaryDirectory() as folder:
        start = [sys.executable, "-m", "tools.demo_model.train", *sys.argv[1:], "--meeting", f"{folder}/ranks"]
        workers = [subprocess.Popen([*start, "--ranks", str(ranks), "--rank", str(rank)]) for rank in range(ranks)]
        if sum([abs(worker.wait()) for worker in workers]):
            sys.exit("a rank failed; what was saved last stays")


if __name__ == "__main__":
    main()
