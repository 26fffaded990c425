"""How the encoder service starts, what it says of itself, and whom it lets in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import grpc
import pytest

from tests.launch import encoder_server, launch
from tests.rpc.encoder_client import (
    IMAGE,
    VIDEO,
    Client,
    image,
    new_picture,
)
from twinlens.v1 import encoder_pb2, media_pb2


def test_it_says_what_it_is(client):
    info = client.info()
    assert (info.architecture, info.width, info.levels) == ("Qwen3VLForConditionalGeneration", 64, 3)
    assert info.dtype == media_pb2.DATA_TYPE_FLOAT32
    assert list(info.modalities) == [IMAGE, VIDEO]
    assert list(info.devices) == ["cpu"]
    assert len(info.digest) == 64
    assert list(info.transports) == [encoder_pb2.TRANSPORT_SHARED_MEMORY, encoder_pb2.TRANSPORT_INLINE]
    assert list(info.unimplemented) == []
    assert client.stub.Release(encoder_pb2.ReleaseRequest(leases=["x"])).released == 0


def test_a_tower_of_qwen3_5_gives_rows_of_one_level(checkpoints):
    with encoder_server(checkpoints("qwen3_5")) as service, Client(service) as client:
        info = client.info()
        assert (info.architecture, info.width, info.levels) == ("Qwen3_5ForConditionalGeneration", 64, 1)
        found = client.one(image(new_picture()))
        assert (found.header.levels, found.rows.shape[1:]) == (1, (1, 64))


def test_only_who_has_the_token_gets_in(checkpoints):
    with encoder_server(checkpoints("qwen2_vl"), auth_token="secret") as service:
        with Client(service) as stranger, pytest.raises(grpc.RpcError) as refused:
            stranger.one(image(new_picture()))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with Client(service, token="secret") as friend:
            assert friend.one(image(new_picture())).error is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "unheard_of"}, "unheard_of is not supported"),
        ({"vision_config": None}, "no vision_config"),
        pytest.param({"vision_config": {"depth": 4}}, "do not fit", marks=pytest.mark.soak),
        ({"vision_config": {"hidden_act": "relu6"}}, "the activation relu6"),
    ],
)
def test_a_checkpoint_that_cannot_be_served_ends_it_with_one_line(checkpoints, tmp_path, change, says):
    folder = Path(shutil.copytree(checkpoints("qwen2_vl"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    for name, value in change.items():
        config[name] = {**config[name], **value} if isinstance(value, dict) else value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(RuntimeError, match=says), encoder_server(folder, light=False):
        pass


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"model": "/nowhere/at/all"}, "neither a folder nor a hub name"),
        ({"dtype": "float8"}, "invalid choice"),
        ({"max_ratio": "nan"}, "not at least"),
        ({"no_such_option": "1"}, "unrecognized arguments"),
        ({"start_seconds": "0.1"}, "has not started within 0.1 seconds"),
        ({"device": "cuda:0"}, "no GPU can be seen"),
        ({"metrics_listen": "192.0.2.1:9400"}, "cannot serve metrics on 192.0.2.1:9400"),
    ],
)
def test_a_bad_option_ends_it_with_one_line(checkpoints, flags, says):
    given = {"model": checkpoints("qwen2_vl"), "listen": "127.0.0.1:0", **flags}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    forks = "start_seconds" not in flags  # a fork, which need not import torch, may start in less
    with pytest.raises(RuntimeError, match=says) as failed, launch("encoder_service", *words, fork=forks):
        pass
    assert len(str(failed.value).splitlines()) == 2, "what the test says, and what the service said"
