"""Settings of texts that transformers supports and our decoder does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.checkpoints.checkpoint import CheckpointError


def check_settings(text: Mapping[str, Any]) -> None:
    """Raises CheckpointError where a text has one of them.

    >>> check_settings({"hidden_size": 64, "word_embed_proj_dim": 64, "do_layer_norm_before": True})
    >>> check_settings({"hidden_size": 64, "word_embed_proj_dim": 32})
    Traceback (most recent call last):
    common.checkpoints.checkpoint.CheckpointError: embeddings of another width than layers have are not supported
    """
    width = text.get("word_embed_proj_dim")
    for found, what in (
        (width not in (None, text["hidden_size"]), "embeddings of another width than layers have"),
        (not text.get("do_layer_norm_before", True), "norms of the sum that layers add to"),
        (text.get("_remove_final_layer_norm"), "layers without a norm behind them all"),
        (not text.get("enable_bias", True), "products without biases, of a text whose norms have some,"),
        (not text.get("layer_norm_elementwise_affine", True), "norms without weights"),
    ):
        if found:
            raise CheckpointError(f"{what} are not supported")
