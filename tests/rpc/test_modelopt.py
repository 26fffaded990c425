"""A checkpoint of NVIDIA's Model Optimizer through both services: the tower, which is not quantised, is that of the
checkpoint that it was made of, and so is the digest."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from common.checkpoints.checkpoint import Checkpoint
from common.media.encoder_digest import VISION, encoder_digest
from common.rows.wire import DType
from tests.modelopt_checkpoints import publish
from tests.rpc.pairs import answer, pair
from tests.rpc.test_end_to_end import expected, request

ONE = "one image"


@pytest.mark.soak
def test_both_services_serve_it_as_it_is_published(checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    """As older releases write it: what is quantised stands in hf_quant_config.json alone."""
    plain = checkpoints("qwen3_vl_moe")
    published, wide = publish(plain, tmp_path, lambda name: "NVFP4" if ".experts." in name else None)
    (published / "config.json").write_text((plain / "config.json").read_text())
    stated = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "model.visual*"]}
    told = {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": stated}
    (published / "hf_quant_config.json").write_text(json.dumps(told))
    with pair(published, light=False) as running:
        assert answer(running.text, request(ONE)).choices[0].token_ids == expected(wide, ONE)[1]
        info, encoder = running.text.get_info(), running.media.get_info()
        digest = encoder_digest(Checkpoint(plain), DType.FLOAT32, VISION)
        assert info.encoder_digest == encoder.digest == digest
        assert (info.weights.quantization, info.weights.bits) == ("modelopt", 4)
        assert "the KV cache is not what the checkpoint suggests" in running.llm.log.read_text("utf-8")
