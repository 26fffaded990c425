"""What is asked for an embedding, by the clients and by `twinlens embed`, and how it is shown."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import grpc
import pytest

from tests.unit.twinlens.fakes import FakeLlm
from twinlens import AsyncLlmClient, LlmClient, audio, embed_request, image, system, user, v1
from twinlens.cli import main


@pytest.fixture
def picture(tmp_path: Path) -> str:
    (tmp_path / "cat.png").write_bytes(b"png")
    return str(tmp_path / "cat.png")


async def test_both_clients_ask_the_same(llm: FakeLlm, llm_address: str) -> None:
    prompt = [system("Represent it."), user(image(b"png"), "A cat.")]
    with LlmClient(llm_address) as client:
        found = client.embed(prompt, dimensions=1, cache_salt="mine", timeout=50)
    assert 40 < llm.remaining < 51  # gRPC rounds a time up
    async with AsyncLlmClient(llm_address) as client:
        assert await client.embed(prompt, dimensions=1, cache_salt="mine") == found
    assert list(found.values) == pytest.approx([0.6])
    assert found.usage.cached_tokens == 4
    assert llm.to_embed[0] == llm.to_embed[1] == embed_request(prompt, dimensions=1, cache_salt="mine")
    assert not llm.requests


def test_every_form_of_a_prompt_but_a_transcription_can_be_embedded(llm: FakeLlm, llm_address: str) -> None:
    ids, text = v1.TokensInput(ids=[5]), v1.TextInput(prompt="a")
    whole = embed_request(user(audio(b"RIFF")), model="m", priority=3, max_handovers=0, request_id="r")
    with LlmClient(llm_address) as client:
        for prompt in ("Hello", ids, text, whole):
            client.embed(prompt)
        for wrong in ({"dimensions": 1}, {"cache_salt": "mine"}):
            with pytest.raises(ValueError, match="inside the EmbedRequest"):
                client.embed(whole, **wrong)
        with pytest.raises(ValueError, match="put it in a message"):
            client.embed(v1.TranscriptionInput())
    chat = v1.ChatInput(messages=[user("Hello")])
    assert llm.to_embed == [v1.EmbedRequest(chat=chat), v1.EmbedRequest(tokens=ids), v1.EmbedRequest(text=text), whole]


def test_the_vector_is_printed_as_json(llm: FakeLlm, llm_address: str, picture: str, capsys) -> None:
    flags = ["--system", "Represent it.", "--max-pixels", "4096", "--dimensions", "2"]
    assert main(["embed", "--llm", llm_address, "--image", picture, "A cat.", *flags]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["values"] == pytest.approx([0.6, -0.8])
    assert printed["usage"] == {"prompt_tokens": 9, "cached_tokens": 4}
    (asked,) = llm.to_embed
    instruction, shown = asked.chat.messages
    assert (instruction.role, asked.dimensions) == ("system", 2)
    assert [part.WhichOneof("part") for part in shown.parts] == ["media", "text"]
    assert shown.parts[0].media.options.max_pixels == 4096


def test_a_picture_alone_or_standard_input_will_do(
    llm: FakeLlm, llm_address: str, picture: str, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    assert main(["embed", "--llm", llm_address, "--image", picture]) == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO("said"))
    assert main(["embed", "--llm", llm_address, "-"]) == 0
    (alone,), (said,) = (asked.chat.messages[0].parts for asked in llm.to_embed)
    assert (alone.WhichOneof("part"), said.text) == ("media", "said")
    assert main(["embed", "--llm", llm_address]) == 2
    assert "nothing to embed" in capsys.readouterr().err
    assert main(["embed", "--llm", llm_address, "what?", "--fps", "1"]) == 2
    assert "--fps needs --video" in capsys.readouterr().err


def test_a_refusal_is_told(llm: FakeLlm, llm_address: str, capsys) -> None:
    status = v1.Status(code=12, message="embeddings of this model are not served", reason="NO_POOLING")
    llm.refusal = (grpc.StatusCode.UNIMPLEMENTED, status)
    assert main(["embed", "--llm", llm_address, "Hello"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "embeddings of this model are not served" in err
