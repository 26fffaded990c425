"""Encoding ahead: a client calls the encoder itself and gives the LLM service keys alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import pictures
from tests.launch import ROOT
from tests.rpc.pairs import Pair, about, answer, asked, tokens
from tests.waiting import until
from twinlens import TwinlensError, image, user, v1, video


def by_key(key: bytes, question: str = "What is it?", modality: v1.Modality = v1.MODALITY_IMAGE) -> v1.ChatMessage:
    return user(v1.Media(modality=modality, key=key), question)


def test_a_picture_that_was_encoded_directly_is_asked_about_by_its_key(qwen3: Pair) -> None:
    file = pictures.encoded(pictures.noise(96, 128, 9_950))
    (header,) = (event.header for event in qwen3.media.encode(image(file)) if event.HasField("header"))
    before = qwen3.media.get_load()
    said = tokens(qwen3.text, asked(by_key(header.key)))
    assert qwen3.media.get_load().vit_calls == before.vit_calls
    assert said == tokens(qwen3.text, asked(about(file)))


def test_what_was_prefetched_is_encoded_once_for_all_who_ask(qwen3: Pair) -> None:
    files = [pictures.encoded(pictures.noise(96, 128, 9_960 + n)) for n in range(3)]
    film = pictures.video(pictures.frames(8, 64, 64, seed=9_960), fps=4)
    before = qwen3.media.get_load()
    answer_ = qwen3.media.prefetch(v1.PrefetchRequest(items=[*map(image, files), video(film)]))
    assert not answer_.errors
    keys = [header.key for header in answer_.headers]
    said = [tokens(qwen3.text, asked(by_key(key))) for key in keys[:3]]
    said.append(tokens(qwen3.text, asked(by_key(keys[3], modality=v1.MODALITY_VIDEO))))
    assert qwen3.media.get_load().encoded_items - before.encoded_items == 4
    assert said[:3] == [tokens(qwen3.text, asked(about(file))) for file in files]
    assert said[3] == tokens(qwen3.text, asked(user(video(film), "What is it?")))


def test_header_only_encodes_nothing(qwen3: Pair) -> None:
    request = v1.EncodeRequest(items=[image(pictures.encoded(pictures.noise(96, 128, 9_970)))], header_only=True)
    before = qwen3.media.get_load()
    kinds = [event.WhichOneof("event") for event in qwen3.media.encode(request)]
    assert kinds == ["header", "done"]
    until(lambda: qwen3.media.get_load().queued_items == 0, "nothing waits")
    assert qwen3.media.get_load().vit_calls == before.vit_calls


def test_rows_are_sent_from_the_first_that_is_wanted(qwen3: Pair) -> None:
    item = image(pictures.encoded(pictures.noise(96, 128, 9_980)))

    def rows(first: int) -> list[v1.EncodeRows]:
        events = qwen3.media.encode(v1.EncodeRequest(items=[item], first_rows=[first]))
        return [event.rows for event in events if event.HasField("rows")]

    (whole,), (rest,) = rows(0), rows(5)
    assert (rest.first_row, rest.count) == (5, whole.count - 5)
    assert whole.data.endswith(rest.data)
    assert len(rest.data) * whole.count == len(whole.data) * rest.count
    assert rows(whole.count) == []
    (refused,) = (
        event.error
        for event in qwen3.media.encode(v1.EncodeRequest(items=[item], first_rows=[whole.count + 1]))
        if event.HasField("error")
    )
    assert refused.status.reason == "BAD_FIRST_ROW"


def test_rows_are_sent_up_to_the_one_that_is_named(qwen3: Pair) -> None:
    item = image(pictures.encoded(pictures.noise(96, 128, 9_981)))

    def events(first: int, end: int) -> list[v1.EncodeResponse]:
        return list(qwen3.media.encode(v1.EncodeRequest(items=[item], first_rows=[first], end_rows=[end])))

    def rows(first: int, end: int) -> list[tuple[int, int, bytes]]:
        found = [event.rows for event in events(first, end) if event.HasField("rows")]
        return [(each.first_row, each.count, each.data) for each in found]

    ((_, count, data),) = rows(0, 0)
    assert rows(0, count) == [(0, count, data)]
    size = len(data) // count
    assert rows(2, 5) == [(2, 3, data[2 * size : 5 * size])]
    assert rows(5, 5) == []
    assert events(5, 5)[-1].HasField("done")
    for first, end in ((5, 4), (0, count + 1), (0, -1)):
        assert events(first, end)[-1].error.status.reason == "BAD_END_ROW"


def test_another_encoder_than_the_one_that_is_meant_gives_nothing(qwen3: Pair) -> None:
    item = image(pictures.encoded(pictures.noise(96, 128, 9_985)))
    meant = v1.EncodeRequest(items=[item], digest=qwen3.media.get_info().digest)
    assert [event.done.item for event in qwen3.media.encode(meant) if event.HasField("done")] == [0]
    meant.digest = "another"
    with pytest.raises(TwinlensError) as error:
        list(qwen3.media.encode(meant))
    assert (error.value.code.name, error.value.reason) == ("UNAVAILABLE", "OTHER_MODEL")


def test_a_key_that_nobody_has_is_not_found(qwen3: Pair) -> None:
    with pytest.raises(TwinlensError) as error:
        answer(qwen3.text, asked(by_key(b"k" * 32)))
    assert error.value.code.name == "NOT_FOUND"
    assert "key" in error.value.field


@pytest.mark.parametrize("example", sorted(ROOT.glob("examples/*.py")), ids=lambda path: path.name)
def test_an_example_shows_how_it_is_used(example: Path) -> None:
    here = {**os.environ, "PYTHONPATH": str(ROOT)}  # wherever else a client is installed
    shown = [sys.executable, example, "--help"]
    done = subprocess.run(shown, capture_output=True, text=True, timeout=180, check=False, env=here)
    assert done.returncode == 0
    assert "--llm ADDR" in done.stdout
    nobody = [sys.executable, example, ROOT / "LICENSE", "What?", "--encoder", "127.0.0.1:1", "--llm", "127.0.0.1:1"]
    done = subprocess.run(nobody, capture_output=True, text=True, timeout=180, check=False, env=here)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "nothing listens there" in done.stderr


def test_the_example_runs(qwen3: Pair, tmp_path: Path, checkpoints: Callable[..., Path]) -> None:
    file = tmp_path / "picture.png"
    file.write_bytes(pictures.encoded(pictures.noise(64, 64, 9_990)))
    where = ["--encoder", qwen3.encoder.address, "--llm", qwen3.llm.address]
    command = [sys.executable, "examples/encode_ahead.py", str(file), "What?", *where]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "4 rows" in done.stdout
