"""What all tests for GPUs have in common."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch


class _Told:
    """What failed is told when it has: a run that is ended for its time may not come to its own end."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            terminal = self._config.get_terminal_writer()
            terminal.line(f"\nFAILED {report.nodeid}\n{report.longreprtext}")
            terminal.flush()


def pytest_configure(config: pytest.Config) -> None:
    """Where reports of all processes come together."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Told(config))


@pytest.fixture(autouse=True)
def usable_context(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that breaks its process's context, as by an access to memory that is not there, is the last one of that
    process, which pytest-xdist replaces: all others would fail for its sake."""
    yield
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            if hasattr(request.config, "workerinput"):
                os._exit(1)
            pytest.exit(f"the GPU is of no use to this process any more: {error}", returncode=1)
