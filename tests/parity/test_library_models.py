"""Models that the library computes, through our prompt, scheduler and paged cache: its ids and its tokens."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer

from common import library_models
from common.checkpoint import Checkpoint, CheckpointError
from common.errors import InvalidInput
from common.library import LibraryModel
from common.media.item import Grid, Header, Key, Modality
from encoder_service.models.generic import LibraryTower, flat_rows
from encoder_service.models.processor import ItemProcessor
from llm_service.layers.attention import general_backend
from llm_service.models import generic
from llm_service.models.served import ServedModel
from llm_service.models.trial import try_out
from llm_service.prompt.builder import PromptBuilder
from llm_service.prompt.detokenizer import TokenTexts
from llm_service.request import ChatPrompt, MediaItem, Message, SamplingParams
from tests import reference
from tests.parity.local_engine import LocalEngine, Prompt, make_prompt
from tools.models.tiny import RECIPES, make

TOKENS = 32
PAGE = Path(__file__).resolve().parents[2] / "docs/MODELS.md"
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)

Part = str | Image.Image


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Coarse colours, so that two pictures differ in what can be seen of them."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


PROMPTS: dict[str, list[Part]] = {
    "text": ["Tell me about two red circles."],
    "one picture": [picture(1, 120, 90), "What is in the picture?"],
    "two of different sizes": ["Left: ", picture(2, 64, 150), " and right: ", picture(3, 200, 60), "\n\nWhich is red?"],
}


@dataclass(frozen=True, slots=True)
class Served:
    """A checkpoint, and both halves of what serves it."""

    folder: Path
    found: LibraryModel
    processor: ItemProcessor
    tower: LibraryTower
    builder: PromptBuilder

    @classmethod
    def of(cls, folder: Path) -> Served:
        found = library_models.describe(folder)
        tower = LibraryTower(folder, found, torch.float32, torch.device("cpu"))
        checkpoint = Checkpoint(folder)
        builder = PromptBuilder(checkpoint, ServedModel.by_library(found))
        return cls(folder, found, ItemProcessor(folder), tower, builder)

    def prompt(self, parts: list[Part], salt: str = "") -> Prompt:
        """One user message, laid out and encoded by us; its inputs are the library's."""
        stills = [part for part in parts if isinstance(part, Image.Image)]
        headers, rows = zip(*map(self._encoded, stills), strict=True) if stills else ((), ())
        items = iter(MediaItem(Modality.IMAGE, Key(b""), index=n) for n in range(len(stills)))
        message = Message("user", tuple(part if isinstance(part, str) else next(items) for part in parts))
        pieces = self.builder.pieces(ChatPrompt((message,)), [Modality.IMAGE] * len(stills))
        return Prompt(self.builder.layout(pieces, headers), list(rows), reference_inputs(self.folder, parts), salt)

    def _encoded(self, still: Image.Image) -> tuple[Header, torch.Tensor]:
        pixels = np.asarray(still)
        parts = self.processor.replacement(np.zeros_like(pixels))
        tokens = sum(part.rows for part in parts)
        with torch.inference_mode():
            rows = self.tower.rows(self.processor.inputs(pixels), tokens)
        key = pixels.tobytes()[:32] + bytes(pixels.shape[:2])
        return Header(key, Modality.IMAGE, Grid(1, 1, tokens), tokens, replacement=parts), rows.clone()

    def engine(self, **options: object) -> LocalEngine:
        return LocalEngine(self.folder, library=self.found, **options)


def reference_inputs(folder: Path, parts: list[Part]) -> dict[str, torch.Tensor]:
    """What the library's processor makes of one user message."""
    whole = reference.processor(folder)
    content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts]
    text = whole.apply_chat_template([{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True)
    stills = [part for part in parts if isinstance(part, Image.Image)]
    media = {"images": stills} if stills else {}
    return dict(whole(text=[text], return_tensors="pt", add_special_tokens=not text.startswith("<s>"), **media))


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with layers that see a window, and with spans whose tokens see each other."""
    return make("gemma3", tmp_path_factory.mktemp("gemma3"))


def test_a_trial_finds_spans_and_tells_other_masks(windowed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert try_out(windowed).spans
    right = general_backend._Segment.mask
    monkeypatch.setattr(general_backend._Segment, "mask", lambda segment, _: right(segment, None))
    with pytest.raises(CheckpointError, match="gemma3 gives other logits in chunks"):
        try_out(windowed)


def test_the_page_of_models_has_each_that_the_library_has() -> None:
    listed = re.findall(r"^\| ([\w.-]+) \| (?:native|library|refused|unknown) \|", PAGE.read_text(), re.MULTILINE)
    known = library_models.library().AutoModelForImageTextToText._model_mapping
    assert listed == [each.model_type for each in known]


def test_an_attention_that_hands_on_what_ours_does_not_know_is_refused() -> None:
    query = torch.zeros(1, 2, 3, 4)
    with (
        generic.attending(lambda *_: torch.zeros(3, 2, 4)),
        pytest.raises(CheckpointError, match="hands on a position_bias"),
    ):
        generic.attention(torch.nn.Module(), query, query, query, None, position_bias=query)


def test_a_family_of_ours_and_the_library_make_the_same_of_one_checkpoint(checkpoints: Callable[..., Path]) -> None:
    """Rows with levels of deepstack, and positions in time, height and width, both ways."""
    folder = checkpoints("qwen3_vl")
    theirs = Served.of(folder)
    assert (theirs.found.levels, theirs.found.axes) == (3, 3)
    prompts = {name: theirs.prompt(parts) for name, parts in PROMPTS.items()}
    ours = {name: make_prompt(folder, parts) for name, parts in PROMPTS.items()}
    for name, prompt in prompts.items():
        assert prompt.layout.ids == ours[name].layout.ids
        assert (prompt.layout.positions, prompt.layout.mrope_delta) == (
            ours[name].layout.positions,
            ours[name].layout.mrope_delta,
        )
        for one, other in zip(prompt.rows, ours[name].rows, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    native = LocalEngine(folder).run(list(ours.values()), GREEDY)
    for options in ({}, {"step_tokens": 16, "max_running": 3}):
        said = theirs.engine(**options).run(list(prompts.values()), GREEDY)
        assert [outcome.tokens for outcome in said] == [outcome.tokens for outcome in native]


def test_tokens_of_pieces_have_their_bytes(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(make("mistral3", tmp_path) / "tokenizer.json"))
    texts, ids = TokenTexts(tokenizer), tokenizer.encode("a b\n é").ids
    assert b"".join(map(texts.bytes_of, ids[1:])) == " a b\n é".encode()
    assert texts.text_of(ids[0]) == "<s>"


def test_pictures_that_depend_on_each_other_are_told() -> None:
    class Counting:
        image_token = "<i>"

        def __init__(self, *, alone: bool) -> None:
            self.alone = alone

        def __call__(self, images: list[Image.Image], **_: object) -> dict[str, object]:
            count = 1 if self.alone else len(images)
            return {"text_replacement_offsets": [[{"replacement": "<i>" * count} for _ in images]]}

    assert library_models.stand_alone(Counting(alone=True))
    assert not library_models.stand_alone(Counting(alone=False))


def test_a_prompt_has_one_picture_where_they_depend_on_each_other(windowed: Path) -> None:
    found = msgspec.structs.replace(library_models.describe(windowed), one_item=True)
    builder = PromptBuilder(Checkpoint(windowed), ServedModel.by_library(found))
    items = [MediaItem(Modality.IMAGE, Key(b""), index=n) for n in range(2)]
    assert builder.pieces(ChatPrompt((Message("user", (items[0], "?")),)), [Modality.IMAGE])
    with pytest.raises(InvalidInput, match="one in a prompt is served"):
        builder.pieces(ChatPrompt((Message("user", tuple(items)),)), [Modality.IMAGE] * 2)


def test_rows_of_a_wrong_number_or_width_are_an_error() -> None:
    two = [torch.zeros(1, 3, 8), torch.zeros(2, 8)]
    assert flat_rows(two, 8).shape == (5, 8)
    for wrong in (torch.zeros(3, 7), [], [torch.zeros(3, 8), torch.zeros(3, 7)], [None]):
        with pytest.raises(RuntimeError, match="something else than rows"):
            flat_rows(wrong, 8)


def test_a_tower_that_gives_other_rows_than_there_are_places_fails(served: Served) -> None:
    pixels = np.asarray(picture(5, 64, 64))
    tokens = sum(part.rows for part in served.processor.replacement(pixels))
    with pytest.raises(RuntimeError, match=f"gives {tokens} rows, and its processor has places for {tokens + 1}"):
        served.tower.rows(served.processor.inputs(pixels), tokens + 1)


@pytest.fixture(scope="module", params=RECIPES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served.of(make(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def prompts(served: Served) -> dict[str, Prompt]:
    return {name: served.prompt(parts) for name, parts in PROMPTS.items()}


@pytest.fixture(scope="module")
def expected(served: Served, prompts: dict[str, Prompt]) -> dict[str, list[int]]:
    found = {name: reference.reference_generate(served.folder, each.inputs, TOKENS) for name, each in prompts.items()}
    assert len(set(map(tuple, found.values()))) == len(found), "the prompts prove nothing"
    return found


def test_prompts_have_the_library_s_ids(prompts: dict[str, Prompt]) -> None:
    for name, prompt in prompts.items():
        assert prompt.layout.ids == prompt.inputs["input_ids"][0].tolist(), name


def test_tokens_are_the_library_s_whatever_the_chunks_and_the_company(
    served: Served, prompts: dict[str, Prompt], expected: dict[str, list[int]]
) -> None:
    chunked = served.engine(step_tokens=16, max_running=1)
    for name, prompt in prompts.items():
        assert chunked.run([prompt], GREEDY)[0].tokens == expected[name], f"{name}, in chunks of 16"
    company = served.engine(prefix_cache=True)
    names = [*prompts, "one picture"]
    for cached in (False, True):
        outcomes = company.run([prompts[name] for name in names], GREEDY)
        assert [outcome.tokens for outcome in outcomes] == [expected[name] for name in names]
        assert not cached or all(outcome.cached >= len(prompts["text"].layout.ids) // 16 * 16 for outcome in outcomes)
