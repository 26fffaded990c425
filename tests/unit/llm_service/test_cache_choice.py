"""What keys and values are kept in, by what was asked for, the checkpoint, and the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from llm_service import cache_choice
from llm_service.cache_choice import choose_cache
from llm_service.model_config.stated_quantization import cache_type_of, suggests_fp8_cache
from llm_service.models.hf.decoder import HfDecoder
from llm_service.prefill.layout import kv_layout
from llm_service.settings import CacheDtype
from llm_service.worker.cache_dtype import with_cache_dtype
from tests.unit.llm_service.test_load import SETTINGS

FLOAT = {"num_bits": 8, "type": "float"}


def stated(**given: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "modelopt", **given}}


@pytest.mark.parametrize(
    ("given", "suggests"),
    [
        ({"kv_cache_quant_algo": "FP8"}, True),
        ({"kv_cache_scheme": "static"}, True),
        ({"kv_cache_scheme": FLOAT}, True),
        ({"kv_cache_scheme": {**FLOAT, "strategy": "attn_head", "symmetric": True, "dynamic": False}}, True),
        ({"kv_cache_scheme": {**FLOAT, "dynamic": True}}, False),
        ({"kv_cache_scheme": {**FLOAT, "strategy": "channel"}}, False),
        ({"kv_cache_scheme": {**FLOAT, "type": "int"}}, False),
        ({"kv_cache_scheme": {**FLOAT, "num_bits": 4}}, False),
        ({"kv_cache_quant_algo": "NVFP4"}, False),
        ({}, False),
    ],
)
def test_a_suggestion_is_of_e4m3_with_scales_or_another(given: dict[str, Any], suggests: bool) -> None:
    assert suggests_fp8_cache(stated(**given)) == suggests
    assert bool(cache_type_of(stated(**given))) == bool(given)


@pytest.mark.parametrize(
    ("asked", "device", "attention", "capability", "expected"),
    [
        ("auto", "cuda:1", "auto", (9, 0), (CacheDtype.FP8, True)),
        ("auto", "cuda", "triton", (8, 9), (CacheDtype.FP8, True)),
        ("auto", "cuda:1", "auto", (8, 6), (CacheDtype.AUTO, False)),
        ("auto", "cuda:1", "flash", (9, 0), (CacheDtype.AUTO, False)),
        ("auto", "cpu", "auto", (0, 0), (CacheDtype.AUTO, False)),
        ("bfloat16", "cuda:1", "auto", (9, 0), (CacheDtype.AUTO, False)),
        ("int8", "cuda:1", "auto", (9, 0), (CacheDtype.INT8, False)),
        ("fp8_e4m3", "cpu", "auto", (0, 0), (CacheDtype.FP8, False)),
    ],
)
def test_a_suggestion_is_followed_where_nobody_asks_for_anything_and_a_gpu_has_e4m3(
    asked: str, device: str, attention: str, capability: tuple[int, int], expected: tuple[CacheDtype, bool]
) -> None:
    config = stated(kv_cache_quant_algo="FP8")
    with mock.patch.object(cache_choice, "cuda_capability", return_value=capability) as found:
        assert choose_cache(asked, config, dtype="bfloat16", device=device, attention=attention) == expected
        assert all(call.args == (int(device.partition(":")[2] or 0),) for call in found.call_args_list)
        assert choose_cache("auto", stated(), dtype="bfloat16", device=device, attention="auto")[0] is CacheDtype.AUTO


def test_a_type_that_keys_and_values_are_not_computed_in_is_refused() -> None:
    with pytest.raises(CheckpointError, match="--kv-cache-dtype float16 goes with --dtype float16 alone"):
        choose_cache("float16", {}, dtype="bfloat16", device="cpu", attention="auto")


def test_a_suggestion_that_cannot_be_followed_is_left_and_what_is_asked_for_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, decoder = (
        mock.Mock(config=stated(kv_cache_quant_algo="FP8")),
        mock.Mock(spec=HfDecoder, keeps_small_cache=False),
    )
    settings = msgspec.structs.replace(SETTINGS, kv_cache_dtype=CacheDtype.FP8, kv_cache_suggested=True)
    assert with_cache_dtype(settings, checkpoint, decoder).kv_cache_dtype is CacheDtype.AUTO
    assert "the KV cache is not what the checkpoint suggests" in "".join(capsys.readouterr())
    with pytest.raises(CheckpointError, match="--kv-cache-dtype fp8 is not for a text that transformers computes"):
        with_cache_dtype(msgspec.structs.replace(settings, kv_cache_suggested=False), checkpoint, decoder)


def test_services_that_keep_blocks_of_e4m3_by_other_scales_exchange_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    digests = set()
    for scale in (0.5, 0.25):
        save_file({"layers.0.self_attn.k_scale": torch.tensor(scale)}, tmp_path / "model.safetensors")
        for kept in (CacheDtype.FP8, CacheDtype.AUTO):
            settings = msgspec.structs.replace(SETTINGS, **_PLACE, kv_cache_dtype=kept)
            digests.add(kv_layout(settings, Checkpoint(tmp_path)))
    assert len(digests) == 4


_PLACE: dict[str, Any] = {"device": "cpu", "dtype": "float32", "weight_dtype": "", "attention": "auto"}
