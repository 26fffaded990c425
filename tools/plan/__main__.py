"""`python -m tools.plan`: how many encoders and LLM services a workload needs, and what autoscalers would do.

python -m tools.plan measure --llm 127.0.0.1:7002 costs.json
python -m tools.plan ask --device cpu=costs.json:1 --rate 20 --first-token 1 --between-tokens 0.05
python -m tools.plan scale --device cpu=costs.json --phases 300:5,600:30,900:5
python -m tools.plan targets --device cpu=costs.json --phases 300:5,600:30,900:5
"""

from __future__ import annotations

import argparse
import io
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tools.plan.autoscaler import PERIOD, Autoscaler, Targets
from tools.plan.costs import Costs
from tools.plan.measure import Pair, measure
from tools.plan.simulation import Cluster, percentile
from tools.plan.workload import Workload, arrivals
from twinlens import LlmClient, TwinlensError, image, v1

SECONDS = 120.0
"""Of arrivals that a plan is tried on."""

DEFAULTS = Targets()


@dataclass(frozen=True, slots=True)
class Device:
    """A kind of device: what things cost there, and what one of it costs."""

    name: str
    costs: Costs
    price: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Services and what the slow requests among theirs see, in seconds."""

    devices: str
    price: float
    first_token: float
    between_tokens: float


def device(text: str) -> Device:
    """Reads NAME=FILE or NAME=FILE:PRICE."""
    name, given, rest = text.partition("=")
    if not given:
        raise argparse.ArgumentTypeError(f"{text} is not NAME=FILE or NAME=FILE:PRICE")
    file, _, price = rest.partition(":")
    try:
        return Device(name, Costs.read(Path(file)), float(price or 1))
    except (OSError, ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}; `measure` writes such a file") from None


def _best(devices: list[Device], workload: Workload) -> str:
    """What can be had at best."""
    best = {kind.name: alone(kind, workload) for kind in devices}
    told = (f"{first:.3f} s and {between:.4f} s on {name}" for name, (first, between) in best.items())
    return f"a request alone has its first token, and each further one, after {', '.join(told)}"


def phases(text: str) -> list[tuple[float, float]]:
    """Reads SECONDS:RATE,SECONDS:RATE."""
    read = [tuple(float(word) for word in part.split(":")) for part in text.split(",")]
    if any(len(part) != 2 for part in read):
        raise argparse.ArgumentTypeError(f"{text}: expected SECONDS:RATE, comma-separated")
    return [(part[0], part[1]) for part in read]


def seen(cluster: Cluster, workload: Workload) -> tuple[float, float]:
    """The 95th percentiles of the time to the first token, and of the mean time between tokens."""
    later = max(1, workload.answer_tokens - 1)
    first = percentile((each.first_token - each.arrived for each in cluster.measured), 0.95)
    between = percentile(((each.ended - each.first_token) / later for each in cluster.measured), 0.95)
    return first, between


def smallest(devices: list[Device], workload: Workload, rate: float, first: float, between: float) -> list[Plan]:
    """The cheapest plan that meets the targets with services apart, and the one with both on each device.

    Either is left out where 64 devices do not do, and both where even a request alone misses the targets.
    """
    found = []
    for kind in devices:
        if not _meets(alone(kind, workload), first, between):
            continue
        encoding, computing = kind.costs.load(workload, rate)
        for joined in (False, True):
            fewest = (
                (math.ceil(encoding), math.ceil(computing)) if not joined else (math.ceil(encoding + computing),) * 2
            )
            for count in range(fewest[0] if joined else sum(fewest), 65):
                parts = (
                    [(count, count)] if joined else [(n, count - n) for n in range(fewest[0], count - fewest[1] + 1)]
                )
                plans = [tried(kind, workload, rate, *part, joined=joined) for part in parts]
                good = [plan for plan in plans if _meets((plan.first_token, plan.between_tokens), first, between)]
                if good:
                    found.append(min(good, key=lambda plan: plan.first_token))
                    break
    return sorted(found, key=lambda plan: plan.price)


def alone(kind: Device, workload: Workload) -> tuple[float, float]:
    """What slow requests see if each has the devices for itself: no number of devices answers sooner."""
    cluster = Cluster.split(kind.costs, workload, 1, 1)
    rate = 1e-6
    cluster.play(arrivals(workload, [(100 / rate, rate)]))
    return seen(cluster, workload)


def _meets(seen: tuple[float, float], first: float, between: float) -> bool:
    return seen[0] <= first and seen[1] <= between


def tried(kind: Device, workload: Workload, rate: float, encoders: int, llms: int, *, joined: bool) -> Plan:
    """What so many services do."""
    count = llms if joined else encoders + llms
    name = (
        f"{count} × {kind.name}, both services on each"
        if joined
        else (f"{encoders} encoder{'s' * (encoders > 1)} and {llms} LLM service{'s' * (llms > 1)}, on {kind.name}")
    )
    if joined:
        cluster = Cluster.joined(kind.costs, workload, count)
    else:
        cluster = Cluster.split(kind.costs, workload, encoders, llms)
    cluster.play(arrivals(workload, [(SECONDS, rate)]))
    return Plan(name, kind.price * count, *seen(cluster, workload))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What targets of autoscalers come to: replicas that were paid for, in hours, and what slow requests see, in s."""

    targets: Targets
    encoder_hours: float
    llm_hours: float
    first_token: float
    between_tokens: float


def outcome(costs: Costs, workload: Workload, load: list[tuple[float, float]], targets: Targets) -> Outcome:
    """Plays a load of phases from one replica of each on."""
    cluster = Cluster.split(costs, workload, 1, 1)
    scaler = Autoscaler(cluster, targets)
    scaler.play(arrivals(workload, load))
    hours = PERIOD / 3600
    return Outcome(
        targets,
        sum(look.encoders for look in scaler.looks) * hours,
        sum(look.llms for look in scaler.looks) * hours,
        *seen(cluster, workload),
    )


def compared(costs: Costs, workload: Workload, load: list[tuple[float, float]]) -> list[Outcome]:
    """What each target of the chart comes to with the other ones as they are: encoders' first."""
    shares = [Targets(busy_workers=share) for share in (0.5, 0.6, 0.7, 0.8, 0.9)]
    backlogs = [Targets(backlog_seconds=seconds) for seconds in (0.5, 1.0, 4.0, 8.0)]
    counts = [Targets(sequences=count) for count in (4.0, 8.0, 32.0, 64.0)]
    return [outcome(costs, workload, load, targets) for targets in (*shares, *backlogs, *counts)]


def picture(patches: int, pixels: int, draw: np.random.Generator) -> v1.Media:
    """A new picture of so many patches of `pixels` to a side."""
    side = round(math.sqrt(patches)) * pixels
    small = draw.integers(0, 256, (16, 16, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC).save(out, "JPEG", quality=92)
    return image(out.getvalue(), min_pixels=side * side, max_pixels=side * side)


def _command(commands: Any, name: str, what: str) -> argparse.ArgumentParser:
    """A subcommand whose help shows defaults."""
    shown = argparse.ArgumentDefaultsHelpFormatter
    made: argparse.ArgumentParser = commands.add_parser(
        name, help=what, description=f"{what[0].upper()}{what[1:]}.", formatter_class=shown
    )
    return made


def main() -> None:
    """Reads the command line and does one of the three."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    measures = _command(commands, "measure", "measure a running pair without other load, and write its costs")
    measures.add_argument("file", type=Path, help="the file to write, in JSON")
    measures.add_argument("--llm", default="127.0.0.1:7002", metavar="ADDR", help="its LLM service")
    sides = "pixels of a patch's side: 14 for Qwen2-VL and Qwen2.5-VL"
    measures.add_argument("--patch-pixels", type=int, default=16, metavar="N", help=sides)
    measures.add_argument("--small", type=int, default=64, metavar="N", help="patches of a small picture")
    measures.add_argument("--large", type=int, default=784, metavar="N", help="patches of a large one")
    asks = _command(commands, "ask", "compute the cheapest numbers of services that meet the targets")
    scales = _command(commands, "scale", "simulate the autoscalers")
    compares = _command(commands, "targets", "simulate the autoscalers with one target after the other changed")
    for command in (asks, scales, compares):
        kinds = "a kind of device: its name, the costs measured there, and its price, by default 1"
        kinds += "; repeatable, to compare" if command is asks else ""
        command.add_argument(
            "--device",
            type=device,
            action="append",
            required=True,
            default=argparse.SUPPRESS,
            metavar="NAME=FILE[:PRICE]",
            help=kinds,
        )
        command.add_argument("--patches", type=int, default=784, metavar="N", help="patches of a picture")
        command.add_argument("--pictures", type=int, default=1, metavar="N", help="pictures in a request")
        command.add_argument("--repeats", type=float, default=0.0, metavar="SHARE", help="share of repeated pictures")
        prompt = "prompt tokens besides the pictures' rows"
        command.add_argument("--prompt-tokens", type=int, default=50, metavar="N", help=prompt)
        command.add_argument("--answer-tokens", type=int, default=100, metavar="N", help="tokens of an answer")
    asks.add_argument("--rate", type=float, required=True, default=argparse.SUPPRESS, help="requests a second")
    required: dict[str, Any] = {"type": float, "required": True, "default": argparse.SUPPRESS, "metavar": "SECONDS"}
    asks.add_argument("--first-token", help="target to the first token, 95th percentile", **required)
    asks.add_argument("--between-tokens", help="target from each token to the next, 95th percentile", **required)
    for command in (scales, compares):
        load = "requests a second for so many seconds, one phase after the other"
        command.add_argument(
            "--phases", type=phases, required=True, default=argparse.SUPPRESS, metavar="SECONDS:RATE,…", help=load
        )
    target: dict[str, Any] = {"type": float, "metavar": "X"}
    busy, work = "share of an encoder's workers that have a batch", "seconds of work that may wait for an encoder"
    scales.add_argument("--busy-workers", default=DEFAULTS.busy_workers, help=f"target: {busy}", **target)
    scales.add_argument("--backlog-seconds", default=DEFAULTS.backlog_seconds, help=f"target: {work}", **target)
    held = "sequences that an LLM service computes"
    scales.add_argument("--sequences", default=DEFAULTS.sequences, help=f"target: {held}", **target)
    given = parser.parse_args()
    if given.command == "measure":
        draw = np.random.default_rng()
        try:
            with LlmClient(given.llm) as client:
                pair = Pair(client)
                costs = measure(pair, lambda n: picture(n, given.patch_pixels, draw), given.small, given.large)
        except TwinlensError as error:
            sys.exit(f"plan: the pair at {given.llm} cannot be measured: {error}")
        costs.write(given.file)
        return
    workload = Workload(given.patches, given.pictures, given.repeats, given.prompt_tokens, given.answer_tokens)
    if given.command == "ask":
        plans = smallest(given.device, workload, given.rate, given.first_token, given.between_tokens)
        if not plans:
            sys.exit(f"plan: no plan of up to 64 devices meets the targets; {_best(given.device, workload)}")
        print(f"{'price':>8}  {'first token':>12}  {'between':>9}  what")
        for plan in plans:
            print(f"{plan.price:8.1f}  {plan.first_token:10.3f} s  {plan.between_tokens:7.4f} s  {plan.devices}")
        return
    if given.command == "targets":
        print("busy workers  backlog, s  sequences  encoder hours  LLM hours  first token, s  between tokens, s")
        for each in compared(given.device[0].costs, workload, given.phases):
            targets = each.targets
            print(
                f"{targets.busy_workers:12.1f}  {targets.backlog_seconds:10.1f}  {targets.sequences:9.0f}"
                f"  {each.encoder_hours:13.2f}  {each.llm_hours:9.2f}"
                f"  {each.first_token:14.3f}  {each.between_tokens:17.4f}"
            )
        return
    cluster = Cluster.split(given.device[0].costs, workload, 1, 1)
    scaler = Autoscaler(cluster, Targets(given.busy_workers, given.backlog_seconds, given.sequences))
    scaler.play(arrivals(workload, given.phases))
    print("seconds  encoders  LLM services  busy workers  sequences")
    shown = (0, 0)
    for look in scaler.looks:
        if (look.encoders, look.llms) != shown:
            shown = look.encoders, look.llms
            print(
                f"{look.at:7.0f}  {look.encoders:8}  {look.llms:12}  {look.busy_workers:12.2f}  {look.sequences:9.1f}"
            )
    first, between = seen(cluster, workload)
    print(f"first token {first:.3f} s, between tokens {between:.4f} s, of 95 requests in 100")


if __name__ == "__main__":
    main()
