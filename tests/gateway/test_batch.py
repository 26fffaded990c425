"""`twinlens batch` through a real gateway: a chat with a picture, a completion and a refusal, each as it is alone."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import httpx2

from tests import pictures
from tests.gateway.trio import Trio
from twinlens.cli import main


def test_a_batch_is_answered_as_each_request_is_alone(door: Trio, tmp_path: Path) -> None:
    picture = base64.b64encode(pictures.encoded(pictures.noise(64, 64, 77_001))).decode()
    shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
    asked = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    content = [shown, {"type": "text", "text": "What is it?"}]
    bodies = {
        "picture": ("/v1/chat/completions", {**asked, "messages": [{"role": "user", "content": content}]}),
        "text": ("/v1/completions", {**asked, "prompt": "hello"}),
        "wrong": ("/v1/chat/completions", {**asked, "messages": []}),
    }
    lines = [{"custom_id": id, "method": "POST", "url": url, "body": body} for id, (url, body) in bodies.items()]
    (tmp_path / "in").write_text("".join(json.dumps(each) + "\n" for each in lines))
    url = f"http://{door.gateway.address}"
    assert main(["batch", str(tmp_path / "in"), str(tmp_path / "out"), "--gateway", url]) == 1
    found = {each["custom_id"]: each for each in map(json.loads, (tmp_path / "out").read_text().splitlines())}
    assert found["wrong"]["response"]["status_code"] == 400
    with httpx2.Client(base_url=url, timeout=180) as client:
        for id in ("picture", "text"):
            path, body = bodies[id]
            alone = client.post(path, json=body).json()
            response = found[id]["response"]
            assert (response["status_code"], response["body"]["choices"]) == (200, alone["choices"])
            assert response["request_id"]
