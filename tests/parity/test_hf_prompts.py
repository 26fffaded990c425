"""What processors of transformers make of items, and what stands for these in our prompts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer

from common.checkpoints.checkpoint import Checkpoint
from common.errors import InvalidInput
from common.hf import models as hf_models
from common.hf import processors as hf_processors
from common.media.item import Grid, Header, Key, Modality, PromptPart
from encoder_service.models.processor import ItemProcessor
from llm_service.model_config.served import ServedModel
from llm_service.prompt.builder import PromptBuilder
from llm_service.prompt.detokenizer import TokenTexts
from llm_service.request import ChatPrompt, MediaItem, Message, TextPrompt, TokenPrompt
from tools.models.tiny import make


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a model whose pictures stand each for itself."""
    return make("gemma3", tmp_path_factory.mktemp("gemma3"))


def test_pictures_that_are_padded_before_tokens_are_made_of_them_are_served_alone(tmp_path: Path) -> None:
    assert hf_models.describe(make("emu3", tmp_path / "emu3")).alone == ("image",)
    assert not hf_models.describe(make("chameleon", tmp_path / "chameleon")).alone


def test_marks_that_touch_are_one_and_a_word_behind_one_gets_a_space(tmp_path: Path) -> None:
    """As Idefics2's processor lays pictures out, which touch each other, words, spaces and special tokens."""
    folder = make("idefics2", tmp_path)
    found, processor = hf_models.describe(folder), hf_processors.processor_of(folder)
    assert (found.seam, found.frame) == ("<fake_token_around_image>", None)
    builder = PromptBuilder(Checkpoint(folder), ServedModel.by_hf(found))
    grid, picture_of = Grid(1, 1, 6), ItemProcessor(folder).replacement(np.zeros((48, 64, 3), np.uint8))
    for text in ("<image>a", "<image><image>b", "<image> c<image>\nd<image></s>e", "f <image><g<image>"):
        count = text.count("<image>")
        made = processor(text=[text], images=[Image.new("RGB", (64, 48))] * count)["input_ids"][0]
        headers = [Header(b"", Modality.IMAGE, grid, 6, replacement=picture_of)] * count
        pieces = builder.pieces(TextPrompt(text), [Modality.IMAGE] * count)
        assert builder.layout(pieces, headers).ids == made, text


def test_videos_are_left_out_where_what_they_show_decides_how_many_rows_they_have(tmp_path: Path) -> None:
    """As in VideoLLaMA 3, which drops what does not change: nobody could lay a prompt out before it is decoded."""
    assert list(hf_models.describe(make("video_llama_3", tmp_path)).placeholders) == ["image"]


@pytest.mark.parametrize("asked", [{}, {"fps": 1.0}, {"fps": 5.0}], ids=["unsaid", "one", "five"])
def test_frames_of_a_video_are_the_processor_s_own_choice(asked: dict[str, float], tmp_path: Path) -> None:
    processor = ItemProcessor(make("glm4v", tmp_path))
    whole = hf_processors.processor_of(tmp_path)
    about = {"total_num_frames": 90, "fps": 30.0, "duration": 3.0}
    frames = [np.zeros((90, 32, 32, 3), np.uint8)]
    made = whole.video_processor(
        videos=frames, video_metadata=[about], return_metadata=True, return_tensors="pt", **asked
    )
    taken = processor.frames(90, 30.0, *asked.values())
    assert taken == [int(number) for number in made["video_metadata"][0].frames_indices]


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

    assert hf_processors.stand_alone(Counting(alone=True))
    assert not hf_processors.stand_alone(Counting(alone=False))


def test_a_prompt_has_one_picture_where_they_depend_on_each_other(plain: Path) -> None:
    found = msgspec.structs.replace(hf_models.describe(plain), alone=("image",))
    builder = PromptBuilder(Checkpoint(plain), ServedModel.by_hf(found))
    items = [MediaItem(Modality.IMAGE, Key(b""), index=n) for n in range(2)]
    assert builder.pieces(ChatPrompt((Message("user", (items[0], "?")),)), [Modality.IMAGE])
    with pytest.raises(InvalidInput, match="makes of a picture depends on others: one in a prompt is served"):
        builder.pieces(ChatPrompt((Message("user", tuple(items)),)), [Modality.IMAGE] * 2)


def test_a_sound_alone_depends_on_others_where_pictures_do_not(plain: Path) -> None:
    found = msgspec.structs.replace(hf_models.describe(plain), alone=("audio",), placeholders={"image": 1, "audio": 2})
    builder = PromptBuilder(Checkpoint(plain), ServedModel.by_hf(found))
    assert len(builder.pieces(TokenPrompt((1, 1)), [Modality.IMAGE] * 2)) == 2
    with pytest.raises(InvalidInput, match="makes of a sound depends on others: one in a prompt is served"):
        builder.pieces(TokenPrompt((1, 2)), [Modality.IMAGE, Modality.AUDIO])


def test_a_template_has_the_seconds_of_sounds_in_their_order(plain: Path) -> None:
    """In its own text, not in a caller's."""
    checkpoint = Checkpoint(plain)
    found = hf_models.describe(plain)
    token = found.placeholders["image"]
    found = msgspec.structs.replace(found, placeholders={"audio": token}, duration_mark="{S}")
    builder = PromptBuilder(checkpoint, ServedModel.by_hf(found))
    part, grid = (PromptPart("", 2, token),), Grid(1, 1, 2)
    headers = [Header(b"", Modality.AUDIO, grid, 2, seconds_per_grid=each, replacement=part) for each in (1.5, 2.25)]
    word = builder.tokenizer.id_to_token(token)
    pieces = builder.pieces(TextPrompt(f"{word} of {{S}} s, {word} of {{S}} s"), [Modality.AUDIO] * 2)
    assert builder.decode(builder.layout(pieces, headers).ids).endswith(f"of 1.50 s, {word * 2} of 2.25 s")
    texts = builder.pieces(TextPrompt("{S}?"), [])
    assert builder.decode(builder.layout(texts, []).ids).endswith("{S}?")
    with pytest.raises(InvalidInput, match="for the lengths of 2 sounds, and 1 sounds"):
        builder.pieces(TextPrompt(f"{word}{{S}}{{S}}"), [Modality.AUDIO])
    said = builder.pieces(ChatPrompt((Message("user", ("{S}",)),)), [])
    assert "{S}" in said, "a message is a text as it is"
