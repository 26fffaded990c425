"""The same workload through `vllm serve`, over its OpenAI endpoint, as a client sees it.

vLLM lives in an environment of its own; `command` is its program there. It gets the same checkpoint, element type and
cores as the others, and is otherwise left as it comes, except that it does not try out the largest picture that there
could be: with 16 million pixels, that takes longer than everything else together on a CPU.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
from PIL import Image

from benchmarks.workload import CONCURRENT, OTHER_QUESTION, QUESTION, jpeg, photograph

_START_SECONDS = 600.0
_STOP_SECONDS = 30.0
_TIMEOUT = 300.0
_ARGUMENTS = ("--dtype", "float32", "--max-model-len", "4096", "--skip-mm-profiling")


@contextlib.contextmanager
def _served(command: Path, folder: Path) -> Iterator[str]:
    """The address of a server that is ready, for the length of the block."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = ["serve", str(folder), "--port", str(port), *_ARGUMENTS]
    environ = {"VLLM_CPU_KVCACHE_SPACE": "2", **os.environ}
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
    raise RuntimeError(f"vLLM does not serve:\n{log.read_text()[-2000:]}")


async def _ask(client: httpx2.AsyncClient, picture: Image.Image, question: str, tokens: int) -> float:
    """Seconds until a greedy answer of exactly `tokens` tokens has come."""
    url = "data:image/jpeg;base64," + base64.b64encode(jpeg(picture)).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
    body = {
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started, count = time.perf_counter(), 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                usage = json.loads(line.removeprefix("data: ")).get("usage")
                count = usage["completion_tokens"] if usage else count
    if count != tokens:
        raise RuntimeError(f"vLLM gave {count} tokens instead of {tokens}")
    return time.perf_counter() - started


async def _measure(address: str, runs: int, tokens: int) -> dict[str, float]:
    async with httpx2.AsyncClient(base_url=address, timeout=_TIMEOUT) as client:
        await _ask(client, photograph(900), QUESTION, 4)
        cold = [await _ask(client, photograph(n), QUESTION, 1) for n in range(runs)]
        same_picture = [await _ask(client, photograph(n), OTHER_QUESTION, 1) for n in range(runs)]
        same_prompt = [await _ask(client, photograph(n), QUESTION, 1) for n in range(runs)]
        long = [await _ask(client, photograph(100 + n), QUESTION, tokens) for n in range(runs)]
        first = statistics.median(cold)
        figures = {
            "ttft_cold": first,
            "ttft_same_picture": statistics.median(same_picture),
            "ttft_same_prompt": statistics.median(same_prompt),
            "per_token": statistics.median((whole - first) / (tokens - 1) for whole in long),
        }
        for many in CONCURRENT:
            rates = []
            for n in range(max(1, runs // 3)):
                pictures = [photograph(200 + 20 * n + k) for k in range(many)]
                started = time.perf_counter()
                await asyncio.gather(*(_ask(client, picture, QUESTION, tokens) for picture in pictures))
                rates.append(many * tokens / (time.perf_counter() - started))
            figures[f"tokens_per_second_{many}"] = statistics.median(rates)
        return figures


def main(command: Path, folder: Path, runs: int, tokens: int) -> dict[str, float]:
    """All figures, each the median of `runs`: seconds, except tokens_per_second."""
    with _served(command, folder) as address:
        return asyncio.run(_measure(address, runs, tokens))
