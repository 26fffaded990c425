"""The plan through `vllm serve`, over its OpenAI endpoint, as a client sees it.

vLLM has a separate environment; `command` is its program there. It gets the same checkpoint, element type and cores as
the others, and its default settings, with two exceptions. By default it reserves one core for its server, one of two
here: this benchmark lets it compute on all. And it does not profile the largest possible picture: with 16 million
pixels, that takes longer than everything else together on a CPU.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx2

from benchmarks.hits import Hits, of_vllm
from benchmarks.sides import Measured, Timed, measure
from benchmarks.workload import Plan, Question
from common.checkpoints.checkpoint import Checkpoint
from common.hardware import default_dtype

_START_SECONDS = 600.0
_STOP_SECONDS = 30.0
_TIMEOUT = 300.0
_ARGUMENTS = ("--max-model-len", "4096", "--skip-mm-profiling")


class NotServingError(Exception):
    """It cannot be measured here; says why, in a few words."""


@contextlib.contextmanager
def _served(command: Path, folder: Path) -> Iterator[str]:
    """The address of a server that is ready, for the length of the block."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    dtype = default_dtype("cpu", Checkpoint(folder))  # what the services compute in as well
    arguments = ["serve", str(folder), "--port", str(port), "--dtype", dtype, *_ARGUMENTS]
    environ = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0", **os.environ}
    with tempfile.NamedTemporaryFile("w+", prefix="vllm-", suffix=".log") as log:
        server = subprocess.Popen([command, *arguments], env=environ, stdout=log, stderr=log, start_new_session=True)
        try:
            _wait(server, f"http://127.0.0.1:{port}", Path(log.name))
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(_STOP_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)  # its workers, whatever they are doing


def _wait(server: subprocess.Popen[bytes], address: str, log: Path) -> None:
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(httpx2.HTTPError):
            if httpx2.get(f"{address}/health").status_code == 200:
                return
        time.sleep(1.0)
    print(log.read_text()[-2000:], file=sys.stderr)
    raise NotServingError("its server does not get ready (its last words are in the log)")


class Vllm:
    """A server that is ready."""

    name = "vLLM"

    def __init__(self, client: httpx2.AsyncClient) -> None:
        self._client = client

    async def ask(self, question: Question, tokens: int) -> Timed:
        """One answer."""
        return await self._answer(_body(question, tokens), tokens)

    async def together(self, questions: Sequence[Question], tokens: int) -> float:
        """Seconds for all."""
        bodies = [_body(question, tokens) for question in questions]
        started = time.perf_counter()
        await asyncio.gather(*(self._answer(body, tokens) for body in bodies))
        return time.perf_counter() - started

    async def hits(self) -> Hits:
        """Its prefix cache's and its cache of prepared media's; raises RuntimeError where it does not tell them."""
        response = await self._client.get("/metrics")
        response.raise_for_status()
        found = of_vllm(response.text)
        if not found:
            raise RuntimeError("vLLM's metrics have no counters of cache hits, so nothing shows what was new to it")
        return found

    async def _answer(self, body: bytes, tokens: int) -> Timed:
        """The first token's time is that of the first event: vLLM sends none before it has a token."""
        started, first, count = time.perf_counter(), 0.0, 0
        headers = {"content-type": "application/json"}
        async with self._client.stream("POST", "/v1/chat/completions", content=body, headers=headers) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    first = first or time.perf_counter() - started
                    usage = json.loads(line.removeprefix("data: ")).get("usage")
                    count = usage["completion_tokens"] if usage else count
        if count != tokens:
            raise RuntimeError(f"vLLM gave {count} tokens instead of {tokens}")
        return Timed(first, time.perf_counter() - started, count)


def _body(question: Question, tokens: int) -> bytes:
    """A request for a greedy answer of exactly `tokens` tokens."""
    url = "data:image/jpeg;base64," + base64.b64encode(question.file()).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question.text}]
    body = {
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body).encode()


def version(command: Path | None) -> str:
    """What its program says; raises NotServingError where it cannot be run."""
    if command is None:
        raise NotServingError("no program of it was named (--vllm)")
    try:
        said = subprocess.run(
            [command, "--version"], check=True, capture_output=True, text=True, timeout=_START_SECONDS
        )
    except OSError as error:
        raise NotServingError(f"its program cannot be run ({error.strerror})") from error
    except subprocess.CalledProcessError as error:
        last = (error.stderr.splitlines() or ["it says nothing"])[-1]
        raise NotServingError(f"its program fails: {last}") from error
    return said.stdout.splitlines()[-1]


def main(command: Path, folder: Path, plan: Plan, tokens: int) -> Measured:
    """Starts it, measures all rows, and stops it."""
    with _served(command, folder) as address:
        return asyncio.run(_measure(address, plan, tokens))


async def _measure(address: str, plan: Plan, tokens: int) -> Measured:
    async with httpx2.AsyncClient(base_url=address, timeout=_TIMEOUT) as client:
        return await measure(Vllm(client), plan, tokens)
