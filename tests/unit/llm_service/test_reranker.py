"""Which checkpoints are rerankers: those that say so, or are named as those that were published without saying it, and
that are asked as those are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.checkpoints.checkpoint import Checkpoint
from llm_service.prompt.builder import PromptBuilder
from llm_service.reranker import Reranker

IDS = {"true_token_id": 7, "false_token_id": 9}
Make = Callable[..., Reranker | None]


@pytest.fixture
def made(checkpoint: Path, tmp_path: Path) -> Make:
    """What a copy of a checkpoint is as a reranker, with these files of sentence-transformers."""

    def make(
        modules: Any = None, score: Any = None, *, name: str = "own", config: Any = None, template: str = ""
    ) -> Reranker | None:
        folder = Path(shutil.copytree(checkpoint, tmp_path / name))
        if modules is not None:
            (folder / "modules.json").write_text(modules if isinstance(modules, str) else json.dumps(modules))
        if score is not None:
            (folder / "1_LogitScore").mkdir()
            (folder / "1_LogitScore" / "config.json").write_text(json.dumps(score))
        if config:
            whole = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps({**whole, **config}))
        if template:
            settings = json.loads((folder / "tokenizer_config.json").read_text())
            (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
            (folder / "chat_template.jinja").write_text(template)
        read = Checkpoint(folder)
        return Reranker.of(read, PromptBuilder(Checkpoint(checkpoint) if config else read))

    return make


def modules(path: str = "1_LogitScore", last: str = "LogitScore") -> list[dict[str, str]]:
    return [
        {"type": "sentence_transformers.base.modules.transformer.Transformer", "path": ""},
        {"type": f"sentence_transformers.cross_encoder.modules.logit_score.{last}", "path": path},
    ]


def with_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has both words be tokens, which the tiny tokenizer has not."""
    words, encode = {"yes": [3], "no": [4]}, PromptBuilder.encode
    monkeypatch.setattr(PromptBuilder, "encode", lambda self, text, **how: words.get(text) or encode(self, text, **how))


def test_a_checkpoint_says_by_which_tokens_it_judges(made: Make) -> None:
    assert made(modules(), IDS) == Reranker(7, 9)


@pytest.mark.parametrize("path", ["1_LogitScore", "elsewhere"])
def test_tokens_that_are_not_stated_are_yes_and_no(made: Make, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    with_words(monkeypatch)
    assert made(modules(path)) == Reranker(3, 4)


def test_one_that_says_nothing_is_known_by_its_name(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with_words(monkeypatch)
    assert made(name="Qwen3-VL-Reranker-2B") == Reranker(3, 4)
    assert made() is None


@pytest.mark.parametrize(
    "given",
    [
        {"modules": modules(last="Pooling"), "score": IDS},
        {"modules": modules(), "score": {**IDS, "false_token_id": None}},
        {"modules": modules(), "score": {**IDS, "true_token_id": 1 << 30}},
        {"modules": modules(), "score": {**IDS, "true_token_id": "7"}},
        {"modules": modules(), "score": IDS, "config": {"model_type": "qwen2_5_vl"}},
        {"modules": modules(), "score": IDS, "template": "{% for m in messages %}{{ m.content }}{% endfor %}"},
        {"modules": modules(), "score": IDS, "template": "{{ raise_exception('no') }}"},
        {"modules": "{", "score": IDS},
        {"modules": [], "score": IDS},
        {"modules": [{"type": "x.LogitScore"}], "score": IDS},
    ],
    ids=["a pooling", "one token", "no token", "a text", "another kind", "template", "refused", "bad", "none", "bare"],
)
def test_what_is_not_known_to_be_asked_so_is_none(made: Make, given: dict[str, Any]) -> None:
    assert made(**given) is None
