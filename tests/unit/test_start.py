"""What a service's processes import before they serve: torch's compiler alone takes longer than the rest of a start."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.launch import ROOT

_COMPILER = {"torch._dynamo", "torch._inductor", "sympy"}
_ENCODER = """
import json, sys
from common.arena import SharedBuffer
from encoder_service.worker.messages import Begin
from encoder_service.worker.runner import Runner

sizes = {"staging_bytes": 1 << 20, "store_bytes": 1 << 20}
arenas = [SharedBuffer.create(name, size) for name, size in sizes.items()]
Runner(Begin(folder=sys.argv[1], device="cpu", dtype="float32", threads=1, **sizes), *arenas).warm_up()
print(json.dumps(sorted(sys.modules)))
"""
_DECODER = """
import json, sys
import torch
import llm_service.engine.__main__
from common.checkpoint import Checkpoint
from llm_service.models.loader import load_decoder

load_decoder(Checkpoint.resolve(sys.argv[1]), torch.float32, torch.device("cpu"))
print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.parametrize("program", [_ENCODER, _DECODER], ids=["encoder", "engine"])
def test_a_process_that_computes_does_not_import_torch_s_compiler(program: str) -> None:
    assert not _imported(program) & _COMPILER


def _imported(program: str) -> set[str]:
    run = subprocess.run(
        [sys.executable, "-c", program, "models/demo"],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    return set(json.loads(run.stdout))
