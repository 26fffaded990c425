"""Real CUDA graphs of towers that transformers computes, made of the operators of a pass. `make gpu-check`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from common.gpu.graphs import CudaCapture
from common.hf.classes import transformers
from tests import pictures
from tests.launch import encoder_server
from tests.rpc.encoder_client import Client, image
from tests.scrape import scrape
from tools.models.graphs import graphs_of
from tools.models.tiny import make

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")


@pytest.mark.parametrize(
    ("kind", "several", "looks"),
    [
        ("llava", True, []),
        ("mistral3", True, []),  # grids of Pixtral's
        ("idefics3", True, ["aten::index"]),  # pictures that are empty are dropped
        ("glm4v", True, []),
        ("kimi_k25", False, []),
        ("gemma4", True, []),
    ],
)
def test_replays_of_other_pictures_are_passes_to_the_bit(
    kind: str, several: bool, looks: list[str], tmp_path: Path
) -> None:
    if kind not in transformers().CONFIG_MAPPING:
        pytest.skip("this release of transformers does not have it")
    assert graphs_of(make(kind, tmp_path), CudaCapture(GPU), GPU, several=several) == ("", looks)


@pytest.mark.parametrize("kind", ["llava", "mistral3"])
def test_the_service_replays_and_gives_the_same_rows(kind: str, tmp_path: Path) -> None:
    items = [image(pictures.encoded(pictures.noise(224, 224, seed=seed))) for seed in range(3)]
    folder, found = make(kind, tmp_path), {}
    for graphs in ("off", "auto"):
        flags = {"device": "cuda", "dtype": "float32", "metrics_listen": "127.0.0.1:0"}
        flags |= {"graphs": "off"} if graphs == "off" else {}
        with encoder_server(folder, light=False, **flags) as service, Client(service) as client:
            found[graphs] = client.encode(*items)
            replays = scrape(service.metrics)['twinlens_encoder_vit_calls_total{mode="graph"}']
            assert (replays > 0) == (graphs == "auto")
    for one, other in zip(found["off"], found["auto"], strict=True):
        np.testing.assert_allclose(one.rows, other.rows, rtol=1e-3, atol=1e-3)
