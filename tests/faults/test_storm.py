"""Everything at once over tight caches: pictures, videos, choices, tenants, aborts, deadlines and flushes."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import pictures
from tests.rpc.pairs import Pair, answer, asked, pair
from tests.waiting import until
from twinlens import TwinlensError, image, user, v1, video

PROMPTS, ATTEMPTS = 24, 160
STILLS = [pictures.encoded(pictures.noise(64 + 32 * (n % 4), 64 + 48 * (n % 3), 8_100 + n)) for n in range(8)]
CLIPS = [pictures.video(pictures.frames(8 + 4 * n, 64, 64, seed=n), fps=4) for n in range(2)]
WORDS = ("red", "blue", "what", "is", "circle")


def request(number: int) -> v1.GenerateRequest:
    """One of a number of requests that are always the same."""
    rng = random.Random(number)
    question = " ".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 40)))
    kind = rng.randrange(5)
    parts: list[str | v1.Media] = [question]
    if kind in (2, 3):
        parts = [*(image(rng.choice(STILLS)) for _ in range(rng.randrange(1, 4))), question]
    elif kind == 4:
        parts = [video(rng.choice(CLIPS)), question]
    sampling = v1.SamplingParams(max_tokens=rng.randrange(1, 30), temperature=0.0, ignore_eos=True)
    if rng.random() < 0.4:
        sampling.MergeFrom(v1.SamplingParams(temperature=1.0, seed=number, top_p=0.9, n=rng.choice([1, 2, 3])))
    if rng.random() < 0.2:
        sampling.MergeFrom(v1.SamplingParams(repetition_penalty=1.3, presence_penalty=0.5))
    return asked(user(*parts), sampling, priority=rng.randrange(-1, 2), cache_salt=rng.choice(["", "", "tenant"]))


def said(both: Pair, number: int) -> list[list[int]]:
    return [choice.token_ids for choice in answer(both.text, request(number)).choices]


def attempt(both: Pair, number: int, alone: list[list[list[int]]]) -> str:
    """Asks, leaves early, aborts, or gives too little time; what came of it."""
    rng = random.Random(number)
    which, way = rng.randrange(PROMPTS), rng.random()
    asking = request(which)
    asking.request_id = f"storm {number}"
    try:
        if way < 0.6:
            return "right" if said(both, which) == alone[which] else f"wrong: {which}"
        with both.text.generate(asking, timeout=rng.random() if way < 0.75 else 180) as events:
            last = rng.randrange(8) if way >= 0.75 else -1
            for place, _ in enumerate(events):
                if place == last and way < 0.85:
                    both.text.abort(asking.request_id, cache_salt=asking.cache_salt)
                elif place == last:
                    return "left"
        return "finished"
    except TwinlensError as error:
        return error.code.name


@pytest.mark.soak
def test_a_storm_of_requests_over_tight_caches_gives_no_wrong_answer_and_leaves_nothing(
    checkpoints: Callable[..., Path],
) -> None:
    tight = {"kv_cache_bytes": "3MiB", "row_cache_bytes": "300KiB", "max_running": 6, "max_step_tokens": 48}
    with pair(checkpoints("qwen3_vl"), **tight) as both:
        alone = [said(both, number) for number in range(PROMPTS)]
        over = threading.Event()

        def flush() -> None:
            while not over.wait(0.3):
                both.text.flush_cache()
                both.media.flush_cache()

        flush_now_and_then = threading.Thread(target=flush)
        flush_now_and_then.start()
        try:
            with ThreadPoolExecutor(24) as threads:
                outcomes = Counter(threads.map(lambda number: attempt(both, number, alone), range(ATTEMPTS)))
        finally:
            over.set()
            flush_now_and_then.join()
        assert set(outcomes) <= {"right", "left", "finished", "CANCELLED", "DEADLINE_EXCEEDED"}, outcomes
        assert outcomes["right"] > ATTEMPTS / 2
        until(both.idle, "nothing is held")
        until(lambda: empty(both), "no row is pinned")


def empty(both: Pair) -> bool:
    """Whether a flush leaves no row."""
    both.text.flush_cache()
    return both.text.get_load().row_bytes == 0
