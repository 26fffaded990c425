"""Device workers of real encoders: what they compute with never changes what comes out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from testkit import reference, triton_interpreter
from tests import pictures
from tests.launch import encoder_server
from tests.rpc.encoder_client import Client, image, video
from twinlens.v1 import media_pb2


def items():
    """Pictures of several sizes, and a video that is long enough to be cut."""
    sizes = ((64, 64), (300, 200), (90, 400), (160, 160))
    film = pictures.video(pictures.frames(40, 320, 240), fps=8)
    found = [image(pictures.encoded(pictures.noise(*size, seed=number))) for number, size in enumerate(sizes)]
    return [*found, video(film, fps=8, max_pixels=40 * 320 * 240)]


def test_rows_do_not_depend_on_the_number_of_workers(checkpoint):
    found = []
    for workers in (1, 3):
        with (
            encoder_server(checkpoint, workers=workers, threads=1) as service,
            Client(service) as client,
        ):
            found.append(client.encode(*items()))
            assert len(client.info().devices) == workers
    grid = found[0][-1].header.grid
    assert grid.t * grid.h * grid.w > 2 * 2048, "the video is cut, a part for each worker"
    for one, two in zip(*found, strict=True):
        assert one.header.tokens == two.header.tokens == len(one.rows)
        np.testing.assert_allclose(one.rows, two.rows, rtol=1e-4, atol=1e-4)


def _type(name):
    return media_pb2.DataType.Value(f"DATA_TYPE_{name.upper()}")


@pytest.mark.soak
def test_shorter_types_give_the_same_rows_but_for_rounding(checkpoints):
    found = {}
    for dtype in ("float32", "bfloat16", "float16"):
        with encoder_server(checkpoints("qwen3_vl"), light=False, dtype=dtype) as service, Client(service) as client:
            found[dtype] = client.encode(*items())
            assert client.info().dtype == _type(dtype)
    for dtype, share in (("bfloat16", 0.05), ("float16", 0.01)):
        for exact, near in zip(found["float32"], found[dtype], strict=True):
            error = np.linalg.norm(exact.rows - near.rows) / np.linalg.norm(exact.rows)
            assert 0 < error < share, dtype
            assert exact.header.key != near.header.key
            assert (exact.header.dtype, near.header.dtype) == (_type("float32"), _type(dtype))


@pytest.mark.skipif(triton_interpreter.is_too_old(), reason="the service's Triton cannot interpret kernels with loops")
def test_our_kernel_gives_the_rows_of_torch_s_attention(checkpoints):
    """In Triton's interpreter, where there is no GPU; the reference computes with torch's."""
    folder, photograph = checkpoints("qwen2_5_vl"), pictures.noise(120, 90, 1)
    with encoder_server(folder, light=False, attention="triton") as service, Client(service) as client:
        found = client.one(image(pictures.encoded(photograph))).rows
        assert '"attention": "triton"' in service.log.read_text()
    wanted = reference.rows(folder, *reference.images_inputs(folder, [photograph]))
    torch.testing.assert_close(torch.from_numpy(found.copy()), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"attention": "flash"}, "--attention flash: it needs a GPU"),
        ({"graphs": "512,1024"}, "CUDA graphs need a GPU"),
    ],
)
@pytest.mark.soak
def test_what_this_machine_cannot_do_ends_the_start_with_one_line_that_says_so(flags, why, checkpoints):
    with (
        pytest.raises(RuntimeError, match=f"encoder_service: {why}"),
        encoder_server(checkpoints("qwen3_vl"), light=False, device="cpu", **flags),
    ):
        pass
