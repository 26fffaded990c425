"""The whole system on one machine in a minute: what `make demo` runs.

Starts both services on free ports, asks about a drawing and a film over gRPC, streams the answers, asks about the
drawing again to show the caches, and then about a photograph, for which this model was not trained. Then it shows
where the time went, and stops everything. The exit code is 0 on success.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tools import demo_media
from tools.launcher import NotStartedError, Service
from twinlens import Answer, EncoderClient, LlmClient, SamplingParams, TwinlensError, image, user, video
from twinlens.cli.tables import milliseconds, table
from twinlens.v1 import Media

_MODEL = Path("models/demo")
_START_SECONDS = 300.0
_OUTSIDE = (
    " It lies outside the demo model's world of drawn shapes and words, so the answer is\n"
    "made of these. A real checkpoint (make up MODEL=…) is what photographs are for."
)
_SAMPLING = SamplingParams(temperature=0, max_tokens=48)


@dataclass(frozen=True, slots=True)
class Asked:
    """One question, its answer, and the client's own clock: seconds to the first words and to the last."""

    title: str
    answer: Answer
    first: float
    total: float


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo."""
    argparse.ArgumentParser(
        prog="make demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="twinlens-demo-") as folder:
        log = Path(folder) / "services.log"
        try:
            with _running(_model(Path(folder)), log) as (encoder, llm):
                works = _show(encoder, llm)
        except (NotStartedError, TwinlensError) as error:
            print(f"\ndemo: {error}\n\nthe services' last words:\n{_tail(log)}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("\ndemo: interrupted; both services have stopped", file=sys.stderr)
            return 130
    if not works:
        print("\ndemo: the caches did not do what they should")
        return 1
    print("\nboth services have stopped; `make up` serves the same until Ctrl-C")
    print("gRPC on 127.0.0.1:7002, OpenAI's API on http://127.0.0.1:8000/v1, and a page to drop your own pictures on:")
    print("make up     # then open http://127.0.0.1:8000/")
    return 0


def _model(folder: Path) -> Path:
    """The embedded checkpoint, or a random one made on the spot where there is none."""
    if _is_here():
        print(f"model: {_MODEL}, the small trained checkpoint of this repository")
        return _MODEL
    from testkit.checkpoints import make_checkpoint

    print(f"model: {_MODEL} is not here, so this is a small RANDOM checkpoint: its words mean nothing")
    make_checkpoint("qwen3_vl", folder / "random")
    return folder / "random"


def _is_here() -> bool:
    """The embedded checkpoint is in this folder."""
    return (_MODEL / "config.json").is_file()


@contextmanager
def _running(model: Path, log: Path) -> Iterator[tuple[EncoderClient, LlmClient]]:
    """Both services on free ports, and a client for each."""
    # One thread each: a model this small gains nothing from more, and the two would be in each other's way.
    flags = ["--model", str(model), "--listen", "127.0.0.1:0", "--threads", "1"]
    print("starting both services …", flush=True)
    with (
        log.open("w") as errors,
        Service("the encoder service", "encoder_service", flags, errors=errors) as encoder,
    ):
        encoders = encoder.wait_ready(_START_SECONDS)
        print(f"encoder service: {encoders}")
        flags += ["--encoders", encoders]
        with Service("the LLM service", "llm_service", flags, errors=errors) as llm:
            address = llm.wait_ready(_START_SECONDS)
            print(f"LLM service:     {address}")
            with EncoderClient(encoders) as encoder_client, LlmClient(address) as llm_client:
                yield encoder_client, llm_client


def _show(encoder: EncoderClient, llm: LlmClient) -> bool:
    """Asks everything; returns whether the caches did their part."""
    picture = image(demo_media.drawing())
    drawing = _ask(llm, "drawing", "What is in the picture?", picture)
    film = _ask(llm, "film", "What happens?", video(demo_media.film()))
    passes = encoder.get_load().vit_calls
    again = _ask(llm, "drawing again", "What is in the picture?", picture)
    more = encoder.get_load().vit_calls - passes
    usage, same = again.answer.usage, again.answer.text == drawing.answer.text
    print(
        f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens came from cache, "
        f"the encoder ran {more} more ViT passes, and the words are {'the same' if same else 'DIFFERENT'}."
    )
    print(f"\nLast a photograph of a cat.{_OUTSIDE if _is_here() else ''}")
    photo = _ask(llm, "photo", "What is in the picture?", image(demo_media.photograph()))
    print(f"\nWhere the time went:\n{_times([drawing, film, again, photo])}")
    return usage.cached_tokens > 0 and more == 0 and same


def _ask(llm: LlmClient, title: str, question: str, media: Media) -> Asked:
    print(f"\n[{title}] {question}\n> ", end="", flush=True)
    answer = Answer()
    first, begun = 0.0, time.perf_counter()
    with llm.generate(user(media, question), _SAMPLING) as events:
        for event in events:
            answer.add(event)
            if event.HasField("delta"):
                first = first or time.perf_counter() - begun
                print(event.delta.text, end="", flush=True)
    print()
    return Asked(title, answer, first, time.perf_counter() - begun)


def _times(asked: list[Asked]) -> str:
    stages = list(dict.fromkeys(stage for each in asked for stage in each.answer.timings))
    rows = [["stage", *(each.title for each in asked)]]
    for stage in stages:
        times = [each.answer.timings.get(stage) for each in asked]
        rows.append([stage, *("–" if seconds is None else milliseconds(seconds) for seconds in times)])
    rows.append(["first words (client)", *(milliseconds(each.first) for each in asked)])
    rows.append(["whole answer (client)", *(milliseconds(each.total) for each in asked)])
    rows.append(["prompt tokens", *(str(each.answer.usage.prompt_tokens) for each in asked)])
    rows.append(["of them cached", *(str(each.answer.usage.cached_tokens) for each in asked)])
    rows.append(["generated tokens", *(str(each.answer.usage.completion_tokens) for each in asked)])
    return table(rows)


def _tail(log: Path, lines: int = 20) -> str:
    return "\n".join(log.read_text("utf-8", "replace").splitlines()[-lines:]) if log.exists() else "(none)"


if __name__ == "__main__":
    sys.exit(main())
