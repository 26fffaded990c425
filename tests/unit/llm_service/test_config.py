"""The LLM service's options: what cannot be together is named."""

from __future__ import annotations

import dataclasses

import pytest

from common.checkpoints.checkpoint import Checkpoint, CheckpointError
from common.config import load
from encoder_service.config import EncoderConfig
from llm_service import config
from llm_service.config import LlmConfig
from llm_service.engine_settings import _adapter_settings
from llm_service.model_config.served import ServedModel
from tests.launch import ROOT

HOSTS = ["--tp=2", "--nodes=2", "--node-rank=0", "--rendezvous=h:1"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "--model is needed"),
        (["--model=m", "--max-running=64", "--max-step-tokens=32"], "--max-step-tokens"),
        (["--model=m", "--speculative-tokens=4", "--overlap=yes"], "exclude each other"),
        (["--model=m", "--draft-model=m"], "--draft-model needs --speculative-tokens"),
        (["--model=m", "--speculative-method=mtp"], "--speculative-method needs --speculative-tokens"),
        (["--model=m", "--speculative-tokens=2", "--speculative-method=draft_model"], "go together"),
        (["--model=m", "--speculative-tokens=2", "--speculative-method=mtp", "--draft-model=m"], "go together"),
        (["--model=m", "--speculative-tokens=2", "--speculative-method=eagle3"], "go together"),
        (["--model=m", "--encoder-key=x"], "--encoder-cert and --encoder-key"),
        (["--model=m", "--video-pruning-rate=1"], "--video-pruning-rate must be below 1"),
        (["--model=m", "--row-mirror", "--shared-memory=no"], "--row-mirror needs --shared-memory"),
        (["--model=m", "--row-mirror", *HOSTS], "--row-mirror is for ranks on one host"),
        (["--model=m", "--symmetric-memory"], "--symmetric-memory is for several --tp ranks on one host"),
        (["--model=m", "--symmetric-memory", *HOSTS], "--symmetric-memory is for several --tp ranks on one host"),
        (["--model=m", "--symmetric-memory", "--tp=2"], "--symmetric-memory is for ranks on GPUs"),
    ],
)
def test_options_that_cannot_be_are_named(capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    with pytest.raises(SystemExit) as ended:
        load(LlmConfig, "TWINLENS_LLM", "", words, {})
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_a_mirror_is_made_when_it_is_asked_for() -> None:
    assert load(LlmConfig, "TWINLENS_LLM", "", ["--model=m", "--row-mirror"], {}).row_mirror
    assert not load(LlmConfig, "TWINLENS_LLM", "", ["--model=m"], {}).row_mirror


@pytest.mark.parametrize(
    ("words", "limits"),
    [
        (["--device=cpu"], (64, 512)),
        (["--device=cpu", "--max-step-tokens=40"], (40, 40)),
        (["--device=cpu", "--max-running=700"], (700, 700)),
        (["--device=cuda:0"], (256, 4096)),
        (["--device=cuda:1"], (256, 8192)),
        (["--device=cuda:1", "--max-running=8"], (8, 8192)),
        (["--device=cuda", "--max-running=8", "--max-step-tokens=64"], (8, 64)),
    ],
)
def test_a_step_is_as_large_as_suits_the_device(
    monkeypatch: pytest.MonkeyPatch, words: list[str], limits: tuple[int, int]
) -> None:
    monkeypatch.setattr(config, "check_device", lambda *_: None)
    monkeypatch.setattr(config, "cuda_memory", lambda index: (24, 80)[index] << 30)
    made = load(LlmConfig, "TWINLENS_LLM", "", ["--model=m", *words], {})
    assert made.step_limits() == limits
    assert made.request_limit() == 2 * limits[0] + made.max_waiting + made.max_waiting_media
    assert dataclasses.replace(made, max_requests=7).request_limit() == 7


def test_device_and_type_can_be_left_to_this_machine_by_the_encoder_s_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "default_device", lambda: "cpu")
    words = ["--device=auto", "--dtype=auto"]
    made = load(LlmConfig, "TWINLENS_LLM", "", ["--model=m", *words], {})
    assert made == LlmConfig(model="m")
    assert (made.chosen_device, made.dtype) == ("cpu", "auto")
    assert load(EncoderConfig, "TWINLENS_ENCODER", "", ["--model=m", *words], {}) == EncoderConfig(model="m")


def test_a_folder_of_adapters_has_to_be_there() -> None:
    checkpoint = Checkpoint.resolve(str(ROOT / "models" / "demo"))
    with pytest.raises(CheckpointError, match=r"^--lora-dir /no/such is not a folder$"):
        _adapter_settings(LlmConfig(model="models/demo", lora_dir="/no/such"), checkpoint, ServedModel.of(checkpoint))
