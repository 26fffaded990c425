"""Fixtures that every suite shares."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from common.hardware import cuda_device_count
from common.hf.description import is_too_old
from common.process.children import ChildProcess
from testkit import triton_interpreter
from testkit.forkserver import forkserver
from tests import kernels_in_turn, quick_collection, quick_hf
from tests.clock import Forward

# Before anything imports torch: tiny models are fastest on one thread, and teams of threads that share cores with
# other processes spin against each other. The services that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NUMBA_NUM_THREADS", "1")  # numba does not look at the other
# Services are started a hundred times: their sources are compiled once.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Who computes never changes in the middle of a test, but where that is what it is about.
os.environ.setdefault("TWINLENS_LLM_KERNELS", "wait")
os.environ.setdefault("TWINLENS_ENCODER_KERNELS", "wait")


# While thousands of tests are imported nothing becomes garbage that is worth a look at all of them.
gc.disable()


def pytest_collectstart(collector: pytest.Collector) -> None:
    """What a file of tests draws while it is imported is the same in every run, whatever was imported before it."""
    if isinstance(collector, pytest.Module):
        _begin_draws_anew()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """So is what a test draws, unless it says a seed of its own, in whichever order and process tests run."""
    _begin_draws_anew()


def _begin_draws_anew() -> None:
    random.seed(0)
    with suppress(ImportError):  # tests of what runs without them
        import numpy as np
        import torch

        np.random.seed(0)
        if torch.cuda.is_initialized():
            torch.manual_seed(0)
        else:  # that would write down each time who has called it, for when a GPU is used
            torch.default_generator.manual_seed(0)


def pytest_collection_finish() -> None:
    """What is here now stays: collections need not look at it again."""
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") == "1":
        from tests import kernel_layout

        triton_interpreter.quicken()
        triton_interpreter.round_products()
        kernel_layout.watch()
    if "numba" in sys.modules:
        kernels_in_turn.take_turns()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.manual_seed_all(0)  # once a GPU is used
    if "transformers" in sys.modules:
        quick_hf.quicken()
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    """How long `make test-soak` keeps the services under mixed load, and engines under drawn trials; `make test-load`
    says ten minutes."""
    parser.addoption("--soak-seconds", dest="soak_seconds", type=float, default=16.0, help="seconds of mixed load")
    parser.addoption("--soak-trial", dest="soak_trial", type=int, default=0, help="the first of the drawn trials")


def pytest_configure(config: pytest.Config) -> None:
    """The suites for CPUs are the same on a machine with GPUs: neither they nor their services see them."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    settings.load_profile("short suite" if "not soak" in config.option.markexpr else "whole suite")
    # Triton decides when a kernel is defined whether it is compiled or interpreted: where there is no GPU, the latter.
    if not cuda_device_count():
        os.environ.setdefault("TRITON_INTERPRET", "1")
        if triton_interpreter.is_too_old():
            triton_interpreter.mend()
    config.pluginmanager.register(quick_collection.Examples())
    if not config.option.file_or_dir:
        quick_collection.rewrite_a_share(config)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """An older transformers, as a machine may have it, is one of families of ours: models that it computes are left
    out."""
    try:
        found = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return
    if not is_too_old(found):
        return
    left_out = pytest.mark.skip(reason=f"transformers {found} is too old for models that it computes")
    for item in items:
        if isinstance(item, pytest.Function) and _makes_models_of_transformers(item.module):
            item.add_marker(left_out)


def _makes_models_of_transformers(module: ModuleType) -> bool:
    return any(getattr(each, "__module__", "").startswith("tools.models") for each in vars(module).values())


# How long an example takes says nothing on a machine that does other things as well. The short suite tries fewer.
_ANY_MACHINE: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("whole suite", **_ANY_MACHINE)
settings.register_profile("short suite", max_examples=40, **_ANY_MACHINE)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes tiny random checkpoints, each kind once: `checkpoints("qwen3_vl", layout="saved", sharded=True)`."""
    from testkit.checkpoints import make_checkpoint

    made: dict[tuple[Any, ...], Path] = {}

    def make(family: Any, **settings: Any) -> Path:
        kind = (family, *sorted(settings.items()))
        if kind not in made:
            made[kind] = make_checkpoint(family, tmp_path_factory.mktemp(family), **settings)
        return made[kind]

    return make


@pytest.fixture(scope="session")
def checkpoint(checkpoints: Callable[..., Path]) -> Path:
    """A tiny Qwen3-VL, for tests to which the family does not matter."""
    return checkpoints("qwen3_vl")


@pytest.fixture
async def forward(monkeypatch: pytest.MonkeyPatch) -> Forward:
    """Puts the clock of the test's event loop forward, which stands still but for that."""
    loop = asyncio.get_running_loop()
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now)

    def put_forward(seconds: float) -> None:
        nonlocal now
        now += seconds

    return put_forward


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """What is freed is freed by counts of references alone."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def forked_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Child processes of the test itself are forked, as those of light services are."""
    if server := forkserver():
        monkeypatch.setattr(ChildProcess, "popen", server.popen)
