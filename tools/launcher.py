"""Starts services as child processes, waits until they serve, and stops them.

A service prints `ready grpc=HOST:PORT`, the gateway `ready http=HOST:PORT`, on standard output when it serves. On
SIGTERM it finishes its work and exits with 0. Children run in separate sessions, so that a Ctrl-C at the terminal
reaches only the launcher, which then stops them in order.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import IO, Any, Self

_READY = ("ready grpc=", "ready http=")


class NotStartedError(RuntimeError):
    """A service ended, or took too long, before it served."""


class Service:
    """One running service. Use it in a `with` block, or call `stop`: the process lives until then."""

    popen: Callable[..., Any] = subprocess.Popen
    """What starts it. Those who start many services in a row have something faster."""

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        *,
        errors: IO[str] | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts `python -m module arguments`.

        Its standard error goes to the file `errors` (None: to ours). `on_change` is called from another
        thread when it serves, and when it has ended for whatever reason.
        """
        self.name = name
        self.address = ""
        self._on_change = on_change
        self._settled = threading.Event()
        self._process: subprocess.Popen[str] = self.popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name=f"output of {name}", daemon=True)
        self._reader.start()

    @property
    def ended(self) -> bool:
        """The process is gone."""
        return self._process.poll() is not None

    def wait_ready(self, timeout: float) -> str:
        """Waits until it serves; returns its address. NotStartedError after `timeout` s, or if it ends."""
        self._settled.wait(timeout)
        if self.address:
            return self.address
        code = self._process.poll()
        how = f"ended with exit code {code}" if code is not None else f"was not ready after {timeout:g} s"
        raise NotStartedError(f"{self.name} {how}")

    def stop(self, timeout: float = 40.0) -> int:
        """Asks it to finish, and kills it after `timeout` s; returns its exit code (negative: the signal)."""
        self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._reader.join()
        return code

    def kill(self) -> None:
        """Ends it at once, for a user who does not want to wait."""
        self._process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if line.startswith(_READY):
                    self.address = line.partition("=")[2].split()[0]
                    self._changed()
        self._process.wait()
        self._changed()

    def _changed(self) -> None:
        self._settled.set()
        self._on_change()
