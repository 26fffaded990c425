"""The encoder on a GPU against the same on the CPU. Run by `make gpu-check`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.checkpoints.checkpoint import Checkpoint
from common.media.item import Modality, Options
from encoder_service.families import config
from encoder_service.item import Inspection
from encoder_service.models.tower import load_tower
from encoder_service.worker.patches import preprocess, resize
from testkit.checkpoints import TOWERS
from tests import pictures
from tests.launch import encoder_server
from tests.rpc.encoder_client import Client, film, image

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("size", [(224, 336), (1001, 640)])
def test_resizing_there_is_the_same_to_the_bit(size):
    frames = torch.from_numpy(np.array(pictures.photograph())).permute(2, 0, 1)[None].contiguous()
    assert torch.equal(resize(frames, size), resize(frames.cuda(), size).cpu())


@pytest.mark.parametrize("family", TOWERS)
def test_rows_are_those_of_the_cpu(family, checkpoints):
    checkpoint = Checkpoint(checkpoints(family))
    settings = config.read(checkpoint)
    photographs = [pictures.photograph("astronaut"), pictures.photograph("coffee")]
    images = settings.processors[Modality.IMAGE]
    plans = [images.plan(Inspection(*each.size), Options()) for each in photographs]
    pixels = [torch.from_numpy(np.array(each))[None] for each in photographs]
    patches = torch.cat([preprocess(part, plan.resized, images) for part, plan in zip(pixels, plans, strict=True)])
    grids = [plan.grid for plan in plans]
    here = load_tower(checkpoint, settings, torch.device("cpu"), torch.float32)(patches, grids)
    tower = load_tower(checkpoint, settings, torch.device("cuda"), torch.float32)
    there = tower(patches.cuda(), grids).cpu()
    torch.testing.assert_close(there, here, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", TOWERS)
def test_the_service_runs_there_in_half_precision(family, checkpoints):
    items = [image(pictures.encoded(pictures.photograph())), film(pictures.frames(30))]
    with encoder_server(checkpoints(family), light=False, device="cpu") as service, Client(service) as client:
        here = client.encode(*items)
    with encoder_server(checkpoints(family), light=False, device="cuda") as service, Client(service) as client:
        there = client.encode(*items)
        assert client.info().devices[0].startswith("cuda:")
    for one, other in zip(here, there, strict=True):
        exact, near = one.rows, other.rows
        cosine = (exact * near).sum(-1) / np.linalg.norm(exact, axis=-1) / np.linalg.norm(near, axis=-1)
        assert cosine.min() > 0.97


def test_batches_that_the_service_prepares_ahead_change_no_row(checkpoints):
    """Small batches and many pictures: each but the first is got ready while another is computed."""
    folder = checkpoints("qwen3_vl")
    items = [image(pictures.encoded(pictures.noise(320, 96 + 32 * seed, seed))) for seed in range(16)]
    settings = {"dtype": "float32", "batch_patches": 512, "max_patches_per_call": 4096}
    with encoder_server(folder, light=False, device="cpu", **settings) as service, Client(service) as client:
        here = client.encode(*items)
    with encoder_server(folder, light=False, device="cuda", **settings) as service, Client(service) as client:
        there = client.encode(*items)
        assert client.load().vit_calls > 2
    for one, other in zip(here, there, strict=True):
        np.testing.assert_allclose(other.rows, one.rows, rtol=1e-3, atol=1e-3)
