"""One tiny checkpoint through both services, beside transformers: ids and greedy tokens must be its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import IO, Any

from common.hf.description import HfModel
from common.hf.models import describe
from llm_service.layers.recurrent.backend import CHUNK
from tools.launcher import NotStartedError, Service
from tools.models.families import taken_by_family
from tools.models.prompts import (
    PROMPTS,
    VIDEO,
    Film,
    Part,
    Prompt,
    Tones,
    film_prompt,
    kind_of,
    sound_prompts,
    sounding_prompts,
)
from tools.models.reference import TOKENS, Reference
from twinlens import Answer, LlmClient, SamplingParams, TwinlensError, audio, image, user, video
from twinlens.prompts import generate_request

_BLOCK = 16
_STATES = "linear_attention"
"""What a configuration calls layers with states, of which snapshots are kept as they are cut."""
_START_SECONDS = 200.0
_SECONDS = 120.0
_FLAGS = ("--listen", "127.0.0.1:0", "--threads", "1")
_ENCODER_FLAGS = ("--decode-processes", "1", "--store-bytes", "64MiB", "--staging-bytes", "256MiB")
_LLM_FLAGS = ("--kv-cache-bytes", "32MiB", "--row-cache-bytes", "64MiB")
RANKS = "two ranks"
OURS = "our decoder"
_COMPANY: dict[str, Prompt] = {
    "a map": ["Who was the first to draw a map of the moon, and with what?"],
    "a clock": ["How does a clock know how long a second is?"],
}
"""Asked besides, so that each prompt is beside three others at least."""
_TOGETHER = 4


class Differs(Exception):
    """What the services say is not what transformers says."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt, what transformers' processor makes of it, and its greedy tokens."""

    parts: Prompt
    inputs: dict[str, Any]
    tokens: list[int]

    @classmethod
    def by(cls, reference: Reference, parts: Prompt) -> Answered:
        inputs = reference.inputs(parts)
        return cls(parts, inputs, reference.tokens(inputs))

    @property
    def count(self) -> int:
        """The prompt's tokens."""
        return int(self.inputs["input_ids"].shape[1])


def answered_by(reference: Reference, found: HfModel) -> dict[str, Answered]:
    """The prompts that a model is compared by: with a video where it takes one, and transformers gets through it.
    Raises Differs where two answers are alike."""
    asked = {name: parts for name, parts in PROMPTS.items() if all(_known(part, found) for part in parts)}
    if "audio" in found.placeholders:
        asked |= {name: _at_rate(parts, found.sound_rate) for name, parts in sound_prompts().items()}
    asked |= sounding_prompts() if found.video_sound else {}
    asked = {name: parts for name, parts in asked.items() if not _depends_on_others(parts, found)}
    answered = {name: Answered.by(reference, parts) for name, parts in asked.items()}
    if "video" in found.placeholders:
        shown = film_prompt(_RATES.get(reference.model.config.model_type))
        with suppress(AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
            answered[VIDEO] = Answered.by(reference, shown)
    for name, parts in _COMPANY.items():
        if len(answered) < _TOGETHER:
            answered[name] = Answered.by(reference, parts)
    if len({tuple(each.tokens) for each in answered.values()}) < len(answered):
        raise Differs("transformers answers two prompts alike, which proves nothing")
    return answered


_RATES = {"qwen2_vl": 2.0, "qwen2_5_vl": 2.0}
"""Frames a second of kinds whose processor takes all unless it is told how many: their families show so many."""


def _at_rate(parts: Prompt, rate: int) -> Prompt:
    """With sounds of so many samples a second, none of which is made up then."""
    return [replace(part, rate=rate) if isinstance(part, Tones) else part for part in parts]


def _depends_on_others(parts: Prompt, found: HfModel) -> bool:
    kinds = [kind_of(part) for part in parts if not isinstance(part, str)]
    return len(kinds) > 1 and not {*found.alone}.isdisjoint(kinds)


def _known(part: Part, found: HfModel) -> bool:
    return isinstance(part, str) or kind_of(part) in found.placeholders


def through_services(folder: Path, step_tokens: int = 16) -> set[str]:
    """Has both services answer prompts: in short steps each alone, and all beside each other, twice, when their prompts
    are cached; and the same at once, on two ranks where transformers has a plan for them. Returns the prompts' names,
    `RANKS` where there were two, and `OURS` where our decoder computed. Raises Differs where an answer is not
    transformers', and NotStartedError, with the last that was said, where a service does not start."""
    found = taken_by_family(folder) or describe(folder)
    reference = Reference(folder)
    answered = answered_by(reference, found)
    with services(folder, step_tokens) as (short, whole, ranks), ThreadPoolExecutor(len(answered)) as pool:
        for client, steps in ((short, "short steps"), (whole, f"at once on {ranks} ranks")):
            for name, each in answered.items():
                _check(f"{name}, {steps}, alone", _asked(client, each.parts), each)
            for how in ("beside others", "cached"):
                said = list(pool.map(lambda each, client=client: _asked(client, each.parts), answered.values()))
                for (name, each), answer in zip(answered.items(), said, strict=True):
                    what = f"{name}, {steps}, {how}"
                    _check(what, answer, each)
                    if answer.started.cached_tokens < kept_of(found, each.count):
                        raise Differs(f"{what}: {answer.started.cached_tokens} of {each.count} tokens were cached")
    logs = [(folder / f"{name}.log").read_text("utf-8") for name in ("llm", "ranks" if ranks > 1 else "whole")]
    if len({_OURS in text for text in logs}) > 1:
        raise Differs("our decoder computes on one rank, and transformers on two")
    return {*answered, *([RANKS] if ranks > 1 else []), *([OURS] if _OURS in logs[0] else [])}


def kept_of(found: HfModel, count: int) -> int:
    """How much of a prompt of so many tokens the prefix cache has of it, where it has all that it may."""
    types = found.text.get("layer_types") or found.text.get("layers_block_type") or ()
    each = CHUNK if _STATES in types else _BLOCK
    return (count - 1) // each * each


_OURS = "our decoder computes the text"
"""What the LLM service's log says."""


def _check(what: str, answer: Answer, expected: Answered) -> None:
    if answer.started.prompt_tokens != expected.count:
        raise Differs(f"{what}: {answer.started.prompt_tokens} prompt tokens, transformers has {expected.count}")
    if (said := answer.choices[0].token_ids) != expected.tokens:
        at = next(at for at, (one, other) in enumerate(zip(said, expected.tokens, strict=True)) if one != other)
        raise Differs(f"{what}: token {at} is another one")


def _asked(client: LlmClient, parts: Sequence[Part]) -> Answer:
    out, sampling = Answer(), SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    try:
        with client.generate(generate_request(user(*map(_sent, parts)), sampling), timeout=_SECONDS) as events:
            for event in events:
                out.add(event)
    except TwinlensError as error:
        raise Differs(str(error)) from error
    return out


def _sent(part: Part) -> Any:
    if isinstance(part, str):
        return part
    if isinstance(part, Film):
        return video(part.file, with_sound=part.with_sound, fps=part.fps)
    if isinstance(part, Tones):
        return audio(part.file())
    file = BytesIO()
    part.save(file, "PNG")
    return image(file.getvalue())


@contextmanager
def services(folder: Path, step_tokens: int) -> Iterator[tuple[LlmClient, LlmClient, int]]:
    """An encoder service and two LLM services over a checkpoint for the length of the block, and clients of these: one
    computes in steps of so many tokens beside three answers, the other a prompt at once, on so many ranks as are
    returned: two, or one where transformers has no plan for more."""
    with ExitStack() as running:
        flags = ["--model", str(folder), *_FLAGS, *_ENCODER_FLAGS]
        with _told(folder, "encoder") as errors:
            encoder = running.enter_context(Service("the encoder service", "encoder_service", flags, errors=errors))
            address = encoder.wait_ready(_START_SECONDS)
        steps = "--max-step-tokens", str(step_tokens + _TOGETHER - 1), "--max-running", str(_TOGETHER)
        llm = ["--model", str(folder), *_FLAGS, *_LLM_FLAGS, "--encoders", address]
        with _told(folder, "llm") as errors, _told(folder, "ranks") as others:
            one = running.enter_context(Service("the LLM service", "llm_service", [*llm, *steps], errors=errors))
            two = running.enter_context(Service("the LLM service", "llm_service", [*llm, "--tp", "2"], errors=others))
            short = running.enter_context(LlmClient(one.wait_ready(_START_SECONDS)))
            ranks = 2 if _serves(two) else 1
        if ranks == 1:
            if not any(why in _last(folder, "ranks") for why in _NO_RANKS):
                raise Differs(_last(folder, "ranks"))
            with _told(folder, "whole") as errors:
                two = running.enter_context(Service("the LLM service", "llm_service", llm, errors=errors))
                two.wait_ready(_START_SECONDS)
        yield short, running.enter_context(LlmClient(two.address)), ranks


_NO_RANKS = "transformers has no plan", "cannot be split", "over 2 ranks"
"""Of why two ranks are refused; the last is of a trial that finds transformers' plan to compute something else."""


def _serves(service: Service) -> bool:
    try:
        service.wait_ready(_START_SECONDS)
    except NotStartedError:
        return False
    return True


@contextmanager
def _told(folder: Path, name: str) -> Iterator[IO[str]]:
    """Where a service writes; the last that one that did not start has said is in the error."""
    try:
        with (folder / f"{name}.log").open("w", encoding="utf-8") as errors:
            yield errors
    except NotStartedError as error:
        raise NotStartedError(f"{error}: {_last(folder, name)}") from None


def _last(folder: Path, name: str) -> str:
    return ((folder / f"{name}.log").read_text(encoding="utf-8").splitlines() or [""])[-1]
