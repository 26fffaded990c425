"""Digests and keys: everything that can change a row changes them, and nothing else does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.checkpoints.checkpoint import Checkpoint
from common.hash_fields import canonical, framed
from common.media.content_key import content_key
from common.media.encoder_digest import INTERNVL_PARTS, VISION, EncoderParts, encoder_digest
from common.media.item import Options
from common.rows.wire import DType
from encoder_service.families import registry as encoded
from llm_service.families import registry as served

fields = st.lists(st.binary(max_size=6), max_size=5)


@given(fields, fields)
def test_different_fields_never_run_together(one: list[bytes], other: list[bytes]) -> None:
    assert (framed(*one) == framed(*other)) == (one == other)


@given(st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=4)))
def test_the_order_of_options_does_not_matter(options: dict[str, Any]) -> None:
    assert canonical(options) == canonical(dict(reversed(options.items())))


def key(**changes: Any) -> bytes:
    given = {"digest": "d", "modality": "image", "content": b"file", "options": {"fps": 2}, "salt": "s", **changes}
    return content_key(**given | {"options": Options(**given["options"])})


def test_a_content_key_depends_on_everything_that_can_change_a_row() -> None:
    changed = [
        key(digest="e"), key(modality="video"), key(options={}), key(options={"fps": 3}), key(salt=""),
        key(content=b"File"), key(content=b""), key(digest="dimage", modality=""), key(salt="", content=b"sfile"),
    ]  # fmt: skip
    assert len({key(), *changed}) == len(changed) + 1
    assert {len(each) for each in changed} == {32}


def test_downloaded_content_is_the_same_content() -> None:
    assert key(content=bytearray(b"file")) == key()


@pytest.fixture
def copied(checkpoints: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoints("qwen3_vl"), tmp_path / "copy"))


def digest(folder: Path, dtype: DType = DType.FLOAT32, parts: EncoderParts = VISION) -> str:
    return encoder_digest(Checkpoint(folder), dtype, parts)


def test_a_copy_has_the_same_digest_and_another_element_type_another(
    checkpoints: Callable[..., Path], copied: Path
) -> None:
    assert digest(copied) == digest(checkpoints("qwen3_vl"))
    assert digest(copied, DType.BFLOAT16) != digest(copied)


def flip(folder: Path, prefix: str) -> None:
    """Changes one byte of a tensor whose name has this prefix."""
    info = next(info for name, info in Checkpoint(folder).tensors.items() if prefix in name)
    with info.file.open("r+b") as file:
        file.seek(info.begin)
        byte = file.read(1)[0]
        file.seek(info.begin)
        file.write(bytes([byte ^ 1]))


def test_a_vision_weight_changes_the_digest_and_a_text_weight_does_not(copied: Path) -> None:
    before = digest(copied)
    flip(copied, "language_model")
    assert digest(copied) == before
    flip(copied, "visual")
    assert digest(copied) != before


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("preprocessor_config.json", {"patch_size": 14}),
        ("video_preprocessor_config.json", {"fps": 4}),
        ("config.json", {"vision_config": {"depth": 9}}),
    ],
)
def test_processor_and_vision_settings_change_the_digest(copied: Path, name: str, change: dict[str, Any]) -> None:
    before = digest(copied)
    path = copied / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert digest(copied) != before


def test_two_draws_of_one_architecture_have_different_digests(checkpoints: Callable[..., Path]) -> None:
    assert digest(checkpoints("qwen3_vl")) != digest(checkpoints("qwen3_vl", seed=5))


def test_shards_change_nothing(checkpoints: Callable[..., Path]) -> None:
    assert digest(checkpoints("qwen3_vl")) == digest(checkpoints("qwen3_vl", sharded=True))


@pytest.mark.parametrize("model_type", served.FAMILIES)
def test_both_services_take_the_digest_of_the_same_parts(model_type: str) -> None:
    assert served.FAMILIES[model_type].encoder == encoded.FAMILIES[model_type].parts


@pytest.mark.parametrize("name", INTERNVL_PARTS.fields)
def test_fields_beside_the_tower_s_section_count_where_a_family_says_so(copied: Path, name: str) -> None:
    before, plain = digest(copied, parts=INTERNVL_PARTS), digest(copied)
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {name: "another"}))
    assert digest(copied, parts=INTERNVL_PARTS) != before
    assert digest(copied) == plain
