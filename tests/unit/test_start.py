"""What a service's processes import before they serve: torch's compiler alone takes longer than the rest of a start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.launch import ROOT

_COMPILERS = {"torch._dynamo", "torch._inductor", "sympy", "triton"}
_ENCODER = """
import json, sys
from common.shm.arena import SharedBuffer
from encoder_service.worker.messages import WorkerSettings
from encoder_service.worker.runner import Runner

sizes = {"staging_bytes": 1 << 20, "store_bytes": 1 << 20}
arenas = [SharedBuffer.create(name, size) for name, size in sizes.items()]
Runner(WorkerSettings(folder=sys.argv[1], device="cpu", dtype="float32", threads=1, **sizes), *arenas).warm_up()
print(json.dumps(sorted(sys.modules)))
"""
_DECODER = """
import json, sys
import torch
import llm_service.engine.__main__
from common.checkpoints.checkpoint import Checkpoint
from llm_service.models.loader import load_decoder

load_decoder(Checkpoint.resolve(sys.argv[1]), torch.float32, torch.device("cpu"))
print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.parametrize("program", [_ENCODER, _DECODER], ids=["encoder", "engine"])
def test_a_process_that_computes_on_a_cpu_imports_neither_torch_s_compiler_nor_triton(program: str) -> None:
    assert not _imported(program) & _COMPILERS


@pytest.mark.parametrize("service", ["encoder_service", "llm_service", "gateway"])
def test_an_interrupt_while_a_service_is_being_read_ends_it_in_silence(service: str) -> None:
    command = [sys.executable, "-X", "importtime", "-m", service, "--listen", "127.0.0.1:0"]
    if service != "gateway":
        command += ["--model", "models/demo"]
    # It tells of each module, and of no more than has room in the smallest of pipes until that is read.
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, pipesize=4096
    ) as process:
        assert process.stderr is not None
        assert any(line.endswith(b" common.config\n") for line in process.stderr), "its options are being read"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=180)
    assert process.returncode == -signal.SIGINT
    assert b"Traceback" not in err
    assert b"ready" not in out


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
