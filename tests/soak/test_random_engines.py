"""Engines with drawn settings under drawn requests: each answer is the one that the request gets alone, of the plainest
engine, and nothing is left behind."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from common.checkpoints.checkpoint import Checkpoint
from llm_service.engine.matchers import Form, Matcher
from llm_service.engine.messages import Resumed
from llm_service.engine.structure import Structures
from llm_service.model_config.served import ServedModel
from llm_service.request import Pooling, SamplingParams, Structure
from llm_service.settings import CacheDtype
from testkit.checkpoints import Family
from testkit.hf_side import Served
from testkit.local_engine import LocalEngine, Progress, Prompt, make_prompt
from tests.adapters import make_adapter
from tests.mtp_checkpoint import with_mtp_layer
from tests.parity.cases import PROMPTS
from tools.models.prompts import PROMPTS as PROMPTS_OF_ANY
from tools.models.tiny import make

pytestmark = pytest.mark.soak

FAMILIES: tuple[Family, ...] = ("qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen4_exp")
WITH_STATES = ("qwen3_5", "qwen4_exp", "lfm2_vl")
HF = ("gemma3", "kimi_k25", "llama4", "lfm2_vl")
"""Without a family: rows that see each other, latents, attention within chunks, short convolutions."""
KINDS = *FAMILIES, *HF
MOST = 40
"""Tokens of an answer."""
STRUCTURES = (
    Structure("regex", "[a-d]{3,30}"),
    Structure("choice", '["red", "a blue circle", "none of them"]'),
    Structure("json_schema", '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'),
)


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a request's answer depends on."""

    prompt: int
    sampling: SamplingParams
    adapter: int = 0
    pooling: Pooling | None = None


@dataclass(frozen=True, slots=True)
class Wish:
    """A request as it is drawn. It comes before the turn `joins`, and is aborted before `leaves`, one `choice` of it or
    all (-1). Its first choice goes on behind `resumes` tokens. Rows land `late`, while it waits, or have no place until
    they are asked for."""

    asked: Asked
    joins: int
    leaves: int | None
    choice: int
    resumes: int
    late: bool
    unplaced: bool
    priority: int
    session: int
    salt: str


@dataclass(slots=True)
class Told:
    """What came of a request: tokens of its choices, how likely they were and how they ended, and the same of its
    prompt."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    likely: dict[int, list[float]] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    prompt: list[float] = field(default_factory=list)
    pooled: bytes = b""


class Model:
    """A checkpoint, prompts of which some begin alike, and what each request is told alone. `more` is what a model
    without a family needs."""

    def __init__(self, folder: Path, prompts: Sequence[Prompt], adapters: Sequence[Path] = (), **more: Any) -> None:
        self.folder, self.adapters, self._more = folder, adapters, more
        words = prompts[0].layout.ids
        self.prompts = [*prompts, *(_followed(prompt, words) for prompt in prompts)]
        self.vocabulary = ServedModel.of(Checkpoint(folder), more.get("hf")).vocab_size
        self._structures = Structures(Checkpoint(folder), self.vocabulary, [self.vocabulary - 1], cache_bytes=1 << 20)
        self.grammars = [self._structures.grammar(structure) for structure in STRUCTURES]
        self._told: dict[bytes, Told] = {}

    def engine(self, **settings: Any) -> LocalEngine:
        """One over this checkpoint, with all adapters."""
        adapters = self.adapters if settings.get("max_loras") else ()
        eos = frozenset({self.vocabulary - 1})
        return LocalEngine(self.folder, match=self._match, adapters=adapters, eos=eos, **self._more, **settings)

    def alone(self, asked: Asked, kept: dict[str, Any]) -> Told:
        """What a request is told with nobody beside it. `kept`: how numbers are stored."""
        key = msgspec.json.encode([asked, kept])
        if key not in self._told:
            wish = Wish(asked, 0, None, -1, 0, False, False, 0, 0, "")
            engine = self.engine(max_loras=len(self.adapters) if asked.adapter else 0, **kept)
            (self._told[key],) = Load(self, engine, [wish], {}).run()
        return self._told[key]

    def _match(self, form: Form, output: Sequence[int] = ()) -> Future[Matcher]:
        """A matcher behind an output, at once."""
        future: Future[Matcher] = Future()
        matcher = self._structures.matcher(form)
        assert all(map(matcher.consume_token, output))
        future.set_result(matcher)
        return future


def _followed(prompt: Prompt, words: Sequence[int]) -> Prompt:
    """A prompt that goes on, as that of a conversation's next turn does."""
    old = prompt.layout
    before = np.frombuffer(old.positions, np.int32).reshape(3, -1)
    behind = np.arange(len(old.ids), len(old.ids) + len(words), dtype=np.int32) + np.int32(old.mrope_delta)
    positions = np.concatenate([before, np.broadcast_to(behind, (3, len(words)))], axis=1)
    layout = dataclasses.replace(old, ids=[*old.ids, *words], positions=np.ascontiguousarray(positions).tobytes())
    return dataclasses.replace(prompt, layout=layout)


class Load:
    """Requests that come and go while an engine serves. `said`: tokens that those have which are resumed."""

    def __init__(self, model: Model, engine: LocalEngine, wishes: Sequence[Wish], said: dict[int, list[int]]) -> None:
        self._model, self._engine, self._said = model, engine, said
        self._wishes = sorted(wishes, key=lambda wish: wish.joins)
        self._told = [Told() for _ in wishes]
        self._numbers: dict[int, int] = {}
        self._left: set[tuple[int, int]] = set()
        self._landing: dict[int, list[int]] = {}

    def run(self) -> list[Told]:
        """What each was told, in the order of `wishes` by when they join."""
        turn, joined = 0, 0
        while True:
            while joined < len(self._wishes) and self._wishes[joined].joins <= turn:
                self._join(joined)
                joined += 1
            self._leave(turn)
            progress = self._engine.advance()
            if progress is not None:
                self._hear(progress)
            landed = self._land()
            if progress is None and not landed and joined == len(self._wishes):
                break
            turn += 1
        scheduler = self._engine.scheduler
        scheduler.check_integrity()
        state = scheduler.state()
        assert (state.waiting, state.running, state.kv_blocks_used) == (0, 0, 0)
        return self._told

    def _join(self, number: int) -> None:
        wish, asked = self._wishes[number], self._wishes[number].asked
        prompt = dataclasses.replace(self._model.prompts[asked.prompt], salt=wish.salt)
        resumed = self._said.get(number, [])[: wish.resumes]
        before = [Resumed(0, np.array(resumed, np.int32).tobytes())] if resumed else []
        self._told[number].tokens[0] = list(resumed)
        id = self._engine.submit(
            prompt,
            asked.sampling,
            asked.adapter,
            asked.pooling,
            unplaced=wish.unplaced,
            late=wish.late,
            priority=wish.priority,
            session=wish.session,
            resume=before,
        )
        self._numbers[id] = number
        if wish.late:
            self._landing[id] = [0] * len(prompt.layout.spans)

    def _land(self) -> bool:
        """A few more rows of one item of each that waits for some."""
        for id, counts in list(self._landing.items()):
            spans = self._model.prompts[self._wishes[self._numbers[id]].asked.prompt].layout.spans
            item = next((n for n, span in enumerate(spans) if counts[n] < span.header.tokens), None)
            if item is None:
                del self._landing[id]
                continue
            counts[item] = min(counts[item] + 7, spans[item].header.tokens)
            self._engine.scheduler.landed(id, item, counts[item])
        return bool(self._landing)

    def _leave(self, turn: int) -> None:
        for id, number in self._numbers.items():
            wish = self._wishes[number]
            if wish.leaves == turn:
                self._engine.scheduler.abort(id, wish.choice)
                choices = range(wish.asked.sampling.n) if wish.choice < 0 else [wish.choice]
                self._left |= {(number, choice) for choice in choices}
                if wish.choice < 0:
                    self._landing.pop(id, None)

    def _hear(self, progress: Progress) -> None:
        assert not progress.failed, "a request failed"
        for output in progress.outputs:
            for scored in output.prompt_logprobs:
                self._engine.scheduler.prompt_logprobs_taken(scored.id, scored.first + len(scored.logprobs))
                self._told[self._numbers[scored.id]].prompt += [each.chosen for each in scored.logprobs]
            for pooled in output.pooled:
                self._told[self._numbers[pooled.id]].pooled = pooled.values
        for complete in progress.complete:
            self._end(self._numbers[complete.id], complete.choice, complete.ended)
        for token in progress.tokens:
            number = self._numbers[token.id]
            assert (number, token.choice) not in self._left, "a choice that was aborted says more"
            told = self._told[number]
            assert token.choice not in told.ends, "a choice that has ended says more"
            told.tokens.setdefault(token.choice, []).append(token.token)
            if token.logprobs is not None:
                told.likely.setdefault(token.choice, []).append(token.logprobs.chosen)
            if token.ended:
                self._end(number, token.choice, token.ended)

    def _end(self, number: int, choice: int, ended: str) -> None:
        assert choice not in self._told[number].ends, "a choice ends twice"
        self._told[number].ends[choice] = ended


def sampling(draw: random.Random, model: Model) -> SamplingParams:
    """Greedy or with a seed, and of what else there is a little."""
    some: dict[str, Any] = {"max_tokens": draw.randint(1, MOST), "ignore_eos": draw.random() < 0.5}
    if draw.random() < 0.5:
        some["temperature"] = 0.0
    else:
        some |= {"seed": draw.randrange(1000), "temperature": draw.choice([0.3, 1.0, 1.7]), "n": draw.choice([1, 1, 3])}
        some |= draw.choice([{}, {"top_p": 0.8}, {"top_k": 20}, {"min_p": 0.02}, {"top_p": 0.9, "top_k": 50}])
    if draw.random() < 0.3:
        some |= {"repetition_penalty": 1.3, "frequency_penalty": draw.choice([0.0, 0.5]), "presence_penalty": 0.2}
    if draw.random() < 0.2:
        some["logit_bias"] = {draw.randrange(model.vocabulary): draw.choice([-100.0, 3.0]) for _ in range(4)}
    if draw.random() < 0.3:
        some["logprobs"] = draw.choice([0, 3])
    if draw.random() < 0.2:
        some["prompt_logprobs"] = 1
    if draw.random() < 0.3:
        some["stop_token_ids"] = tuple(draw.sample(range(model.vocabulary), 30))
        some["min_tokens"] = draw.randint(0, some["max_tokens"])
    if draw.random() < 0.15:
        some["bad_word_ids"] = (*((draw.randrange(256), draw.randrange(256)) for _ in range(3)), (5,))
    if draw.random() < 0.25:
        some["grammar"] = draw.choice(model.grammars)
        some["min_tokens"] = 0
    return SamplingParams(**some)


def wish(draw: random.Random, model: Model, adapters: int) -> Wish:
    asked = Asked(
        prompt=draw.randrange(len(model.prompts)),
        sampling=sampling(draw, model),
        adapter=draw.randint(0, adapters),
        pooling=Pooling.LAST if draw.random() < 0.07 else None,
    )
    if asked.pooling is not None:
        asked = msgspec.structs.replace(asked, sampling=SamplingParams(max_tokens=1, temperature=0.0))
    goes = draw.random() < 0.2
    late = draw.random() < 0.2
    return Wish(
        asked,
        joins=draw.randint(0, 60),
        leaves=draw.randint(0, 90) if goes else None,
        choice=draw.choice([-1, 0, asked.sampling.n - 1]),
        resumes=draw.randint(1, MOST) if draw.random() < 0.15 and asked.pooling is None else 0,
        late=late,
        unplaced=not late and draw.random() < 0.2,
        priority=draw.choice([0, 0, 1, -1]),
        session=draw.choice([0, 0, 1, 2]),
        salt=draw.choice(["", "", "other"]),
    )


def settings(draw: random.Random, model: Model, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """How an engine is set up, and how it stores numbers, which the plain one does as well."""
    kept: dict[str, Any] = {"weight_dtype": "" if kind in HF else draw.choice(["", "", "int8"])}
    size = draw.choice([8, 16, 32])
    longest = max(len(prompt.layout.ids) for prompt in model.prompts) + MOST
    given: dict[str, Any] = {
        "block_size": size,
        "blocks": longest // size + draw.choice([2, 6, 20, 200]),
        "step_tokens": draw.choice([300, 1000] if kind == "gemma3" else [24, 64, 100, 1000]),
        "max_running": draw.choice([1, 3, 8, 16]),
        "prefix_cache": draw.random() < 0.7,
        "overlap": draw.random() < 0.6,
        "keep_media_whole": draw.random() < 0.2,
        "decode_slowdown": draw.choice([0.0, 0.0, 2.5]),
        "speculative_tokens": draw.choice([0, 2, 4]),
    }
    if kind not in (*WITH_STATES, *HF):
        kept["kv_cache_dtype"] = draw.choice([CacheDtype.AUTO, CacheDtype.AUTO, CacheDtype.INT8])
    if kind not in WITH_STATES:
        given["host_blocks"] = draw.choice([0, 0, 40])
    if kind == "qwen3_5" and given["speculative_tokens"] and draw.random() < 0.5:
        given["mtp"] = True
    if model.adapters and draw.random() < 0.4:
        given["max_loras"] = draw.choice([1, 2])
    return given, kept


@pytest.fixture(scope="module")
def models(checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    @cache
    def made(kind: str) -> Model:
        if kind in HF:
            served = Served.of(make(kind, tmp_path_factory.mktemp(kind)))
            text = served.text()
            assert text is not None
            prompts = [served.prompt(parts) for parts in PROMPTS_OF_ANY.values() if _is_seen(parts)]
            return Model(served.folder, prompts, hf=served.found, text=text)
        folder = checkpoints(kind)
        if kind == "qwen3_5":
            folder = with_mtp_layer(folder, tmp_path_factory.mktemp("mtp"))
        adapters = [make_adapter(folder, tmp_path_factory.mktemp("lora"), seed=n) for n in (1, 2)]
        return Model(folder, [make_prompt(folder, parts) for parts in PROMPTS.values()], adapters)

    return made


def _is_seen(parts: Sequence[Any]) -> bool:
    return all(isinstance(part, str | Image.Image) for part in parts)


def test_answers_are_those_that_requests_get_alone(models: Callable[[str], Model], pytestconfig: pytest.Config) -> None:
    """A trial is drawn by its number, so that it can be had again: from `--soak-trial` on, for half of
    `--soak-seconds`."""
    end = time.monotonic() + pytestconfig.getoption("soak_seconds") / 2
    first = pytestconfig.getoption("soak_trial")
    for number in itertools.count(first):
        trial(number, models)
        if time.monotonic() > end:
            print(f"\n{number + 1 - first} trials, {first} to {number}")
            break


def trial(number: int, models: Callable[[str], Model]) -> None:
    draw = random.Random(number)
    kind = KINDS[number % len(KINDS)]
    model = models(kind)
    given, kept = settings(draw, model, kind)
    adapters = len(model.adapters) if given.get("max_loras") else 0
    wishes = sorted((wish(draw, model, adapters) for _ in range(draw.randint(4, 16))), key=lambda each: each.joins)
    alone = [model.alone(each.asked, kept) for each in wishes]
    said = {n: told.tokens.get(0, [])[:-1] for n, told in enumerate(alone)}
    engine = model.engine(**given, **kept)
    told = Load(model, engine, wishes, said).run()
    # Where the last bit of a key decides how it is rounded to 8 bits, what comes of it differs by more than that bit.
    near = 0.1 if kept.get("kv_cache_dtype") is CacheDtype.INT8 else 2e-3
    for n, (each, ours, theirs) in enumerate(zip(wishes, told, alone, strict=True)):
        about = f"trial {number} of {kind}, {given} {kept}, request {n}: {each}"
        gone = each.leaves is not None
        for choice in range(each.asked.sampling.n):
            left = gone and each.choice in (-1, choice)
            wanted, found = theirs.tokens.get(choice, []), ours.tokens.get(choice, [])
            assert found == (wanted[: len(found)] if left else wanted), f"{about}, choice {choice}"
            if not left or choice in ours.ends:
                assert ours.ends.get(choice, "") == theirs.ends.get(choice, ""), f"{about}, choice {choice}"
            likely = ours.likely.get(choice, [])
            behind = theirs.likely.get(choice, [])[min(each.resumes, len(said[n])) if choice == 0 else 0 :]
            assert likely == pytest.approx(behind[: len(likely)] if left else behind, abs=near), about
        if not gone and not each.resumes:  # an answer has begun: its prompt was scored
            assert ours.prompt == pytest.approx(theirs.prompt, abs=near), about
            vectors = (np.frombuffer(each.pooled, np.float32) for each in (ours, theirs))
            np.testing.assert_allclose(*vectors, atol=near, err_msg=about)
