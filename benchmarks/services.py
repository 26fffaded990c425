"""Both services, started as a user starts them, for the duration of a measurement."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from common.hardware import NOT_LOCKED, cuda_device_count

popen: Callable[..., Any] = subprocess.Popen
"""What starts a process of ours. Those who take many small measurements in a row have something faster."""

_STOP_SECONDS = 30
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Running:
    """A process that serves: at which address, by which id."""

    address: str
    pid: int

    def cpu_seconds(self) -> float:
        """What it has computed since it began, in user and in system time; its children are not counted."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS


@contextmanager
def process(module: str, *flags: str, checkout: Path | None = None) -> Iterator[str]:
    """The address of `running`, for those who want nothing else of it."""
    with running(module, *flags, checkout=checkout) as service:
        yield service.address


@contextmanager
def running(module: str, *flags: str, checkout: Path | None = None) -> Iterator[Running]:
    """Starts `python -m module` on a free port; gives the address of its `ready` line, and drains it at the end.

    Its code is that of the folder `checkout`, or of this process.
    """
    environ = environment(checkout)
    if checkout is not None:
        environ["PYTHONPATH"] = str(checkout)
    command = [sys.executable, "-m", module, "--listen", "127.0.0.1:0", "--log-level", "warning", *flags]
    heard = {"stderr": subprocess.PIPE} if cuda_device_count() else {}
    child = popen(command, stdout=subprocess.PIPE, text=True, env=environ, cwd=checkout, **heard)
    if heard:
        threading.Thread(target=_pass_on, args=(child.stderr,), daemon=True).start()
    try:
        assert child.stdout is not None
        line = child.stdout.readline()
        if not line.startswith("ready "):
            raise RuntimeError(f"{module} did not start")
        _, _, address = line.split()[1].partition("=")
        yield Running(address, child.pid)
    finally:
        child.send_signal(signal.SIGTERM)
        child.wait(_STOP_SECONDS)


def _pass_on(said: IO[str]) -> None:
    """What a service says goes on to where ours goes, and stands beside the figures where that is why they are low."""
    with said:
        for line in said:
            print(line, end="", file=sys.stderr, flush=True)
            if NOT_LOCKED in line:
                print(f"\nNot as it should be: {NOT_LOCKED}\n", flush=True)


def environment(checkout: Path | None = None) -> dict[str, str]:
    """That of a service: it waits for its kernels, unless ours says otherwise, since torch would be measured instead.
    Encoders of an older `checkout` lack the option, and would end with it."""
    waiting = {"TWINLENS_LLM_KERNELS": "wait"}
    if checkout is None or "    kernels: str" in (checkout / "encoder_service" / "config.py").read_text():
        waiting["TWINLENS_ENCODER_KERNELS"] = "wait"
    return {**waiting, **os.environ, "PYTHONUNBUFFERED": "1"}


@contextmanager
def partner(module: str, *arguments: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """`python -m module` for the length of the block: it is asked on its standard input, answers on its standard output
    and ends when nobody can ask it any more."""
    command = [sys.executable, "-m", module, *arguments]
    given = {**os.environ, **environ}
    child: subprocess.Popen[str] = popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=given)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        yield child
    finally:
        child.stdout.close()
        child.stdin.close()
        code = child.wait()
    if code:
        raise RuntimeError(f"{module} ended with {code}")


@contextmanager
def both(
    model: Path,
    *,
    encoder_flags: tuple[str, ...] = (),
    llm_flags: tuple[str, ...] = (),
    checkout: Path | None = None,
) -> Iterator[tuple[str, str]]:
    """One encoder and one LLM service; their addresses. `model` is an absolute path where there is a `checkout`."""
    of_both = ("--model", str(model))
    with ExitStack() as stack:
        encoder = stack.enter_context(process("encoder_service", *of_both, *encoder_flags, checkout=checkout))
        flags = (*of_both, "--encoders", encoder, *llm_flags)
        llm = stack.enter_context(process("llm_service", *flags, checkout=checkout))
        yield encoder, llm
