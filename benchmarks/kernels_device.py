"""`python -m benchmarks.kernels_device`: every kernel once on this device, in Qwen3-VL-8B's shapes, compared with
torch's result, and again in a graph's replay. It shows only their difference. It ends within four minutes, and
compiles the kernels for later benchmarks.

A kernel that crashes, hangs or breaks the device ends its process, and a new one continues after it. The first error
of each failure is shown. Inputs are drawn once and *repeated* by the replay; there are no caches and no peers.
`--once` launches each kernel a single time in this process, without a limit: for a sanitizer.
"""

from __future__ import annotations

import argparse
import faulthandler
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor

from benchmarks.device import Again
from benchmarks.llm_device import Settings, config_of, make_runner, step
from benchmarks.quantized import FORMS
from common.gpu.device import told_waits, use_gpu
from common.gpu.graphs import Capture, CaptureFailed, CudaCapture, first_of
from llm_service.layers.linear.quantized_weight import Number, QuantizedWeight
from testkit import triton_interpreter

if TYPE_CHECKING:
    from llm_service.layers.gpu.int8_weight import Int8Weight
    from llm_service.layers.gpu.quantized_weight import GpuWeight

_SECONDS = 45
"""For one kernel, its compilation included."""
_FAR = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""How far from torch's a result may be, by its length."""
_ROUNDED = 6e-2
"""The same where inputs are rounded to 8 bits."""
_GRAPHS = "graphs of steps"
_FAILED = 3
"""The exit code of a process that went through all; one that is ended for its time has 1."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where kernels run, and in what; a `tiny` one has small shapes."""

    device: torch.device
    dtype: torch.dtype
    tiny: bool

    def drawn(self, *size: int) -> Tensor:
        """Numbers around nought."""
        return torch.randn(size, device=self.device).to(self.dtype)


@dataclass(frozen=True, slots=True)
class Trial:
    """What a kernel computes over tensors that stay, and what torch does."""

    run: Callable[[], Tensor]
    expected: Tensor
    far: float = 0.0


Trials = dict[str, Callable[[Place], "Trial | None"]]
"""By name; None: it has compared by itself, and is not captured alone."""


def trials() -> Trials:
    """All, in the order in which Qwen3-VL-8B needs them."""
    return {
        "memory of the host that a GPU reads by itself": _locked,
        "memory of another process's pool": _pool,
        "norm with residual": lambda here: _row_kernel(here, "add_rms_norm"),
        "norm and rotary of queries and keys": lambda here: _row_kernel(here, "qk_norm_rotary"),
        "gate": lambda here: _row_kernel(here, "silu_and_mul"),
        "attention of tokens": lambda here: _attention(here, (1,) * 8),
        "attention of tokens with drafts": lambda here: _attention(here, (4,) * 4),
        "attention of prompts": lambda here: _attention(here, (1, 200, 1, 65)),
        "attention over 8 bits": lambda here: _attention(here, (1, 1, 65), "int8"),
        "attention over e4m3": lambda here: _attention(here, (1, 1, 65), "fp8"),
        "draws": _draws,
        "tower's attention": lambda here: _tower_attention(here, "triton"),
        "tower's attention by flash": lambda here: _tower_attention(here, "flash"),
        "tower's rotary positions": _tower_rotary,
        "pixels": _pixels,
        _GRAPHS: _steps,
        "what a step waits for": _waits,
        **{f"{form}, {rows} rows": _product(form, rows) for form in FORMS for rows in (4, 300)},
        "experts": _experts,
        **{f"experts in {form}": _grouped(form) for form in ("fp8", "w8a8", "awq")},
        "adapters": _adapters,
        "short convolutions": _convolutions,
        "delta net": _delta_net,
        "Mamba-2": _mamba2,
        "Kimi Delta Attention": _kda,
        "attention over latents": _latents,
        "index scores": _index_scores,
    }


def _locked(here: Place) -> None:
    """Where none can be locked, services wait for each copy, and figures are lower than elsewhere."""
    if here.device.type != "cuda":
        return
    from ctypes import c_size_t, c_uint, c_void_p

    from common.gpu.cuda_driver import call
    from common.shm.arena import SharedBuffer

    memory = torch.frombuffer(SharedBuffer.create("locked", 64 << 20).view, dtype=torch.uint8)
    call("cuMemHostRegister_v2", c_void_p(memory.data_ptr()), c_size_t(memory.nbytes), c_uint(1))
    call("cuMemHostUnregister", c_void_p(memory.data_ptr()))


def _pool(here: Place) -> None:
    if here.device.type != "cuda":
        return
    from common.gpu.device_memory import driver

    pool = driver(here.device).create(here.device, 2 << 20)
    program = "import sys, torch; from common.gpu.device_memory import driver; here = torch.device('cuda:0')\n"
    program += "driver(here).open(here, bytes.fromhex(sys.argv[1])).close()"
    command = [sys.executable, "-c", program, pool.handle.hex()]
    reader = subprocess.run(command, capture_output=True, text=True, check=False)
    assert reader.returncode == 0, reader.stderr.strip().splitlines()[-1]


def _row_kernel(here: Place, call: str) -> Trial:
    from llm_service.layers.gpu import row_ops
    from llm_service.layers.ops import TORCH

    rows, width, heads, head = (3, 64, 4, 16) if here.tiny else (64, 4096, 32, 128)
    angles = torch.randn(rows, 1, head // 2, device=here.device).repeat(1, 1, 2)
    pair, gains = (angles.cos().to(here.dtype), angles.sin().to(here.dtype)), (here.drawn(head), here.drawn(head))
    given: dict[str, tuple[object, ...]] = {
        "add_rms_norm": (here.drawn(rows, width), here.drawn(rows, width), here.drawn(width), 1e-6),
        "qk_norm_rotary": (here.drawn(rows, 2 * heads, head), pair, heads, heads // 2, gains, 1e-6),
        "silu_and_mul": (here.drawn(rows, 6 * width),),
    }

    def by(ops: object) -> Tensor:
        found = getattr(ops, call)(*given[call])
        return torch.stack(found) if isinstance(found, tuple) else found

    return Trial(lambda: by(row_ops), by(TORCH))


def _attention(here: Place, counts: tuple[int, ...], kept: str = "auto") -> Trial:
    from dataclasses import replace

    from llm_service.layers.attention.backend import CacheShape
    from llm_service.layers.attention.choose import choose
    from llm_service.layers.attention.metadata import AttentionMetadata
    from llm_service.settings import CacheDtype
    from testkit.attention_cases import Case
    from testkit.plain_attention import paged_attention

    heads = (4, 2, 64) if here.tiny else (32, 8, 128)
    case = Case.random(CacheShape(1, 100, 16, *heads), counts, here.dtype, 1, here.device)
    query, key, value = case.heads
    shape = replace(case.shape, kept=CacheDtype(kept))
    batch = choose("triton", shape, here.dtype, here.device).batch(case.chunks)
    if kept == "auto":
        metadata = AttentionMetadata.of(case.chunks, shape.block_size, here.device)
        expected = paged_attention(query, key, value, case.cache.clone()[0], metadata, shape.kind)
        return Trial(lambda: batch.attend(query, key, value, case.cache[0]), expected)
    ours, theirs = (shape.new_cache(here.dtype, here.device)[0] for _ in range(2))
    everywhere = torch.arange((shape.blocks + 1) * shape.block_size, device=here.device)
    for cache in (ours, theirs):
        if shape.fp8:
            cache.copy_(case.cache[0])
            continue
        for part, wide in zip(cache, case.cache[0], strict=True):
            shape.int8_tokens(part).write(everywhere, wide.flatten(0, 1))
    other = choose("torch", shape, here.dtype, here.device).batch(case.chunks)
    return Trial(lambda: batch.attend(query, key, value, ours), other.attend(query, key, value, theirs))


def _draws(here: Place) -> None:
    from llm_service.plan import Draw
    from llm_service.worker import gpu_sampler, sampler

    logits = 3 * torch.randn(3, 1000 if here.tiny else 151_936)
    draws = [Draw(at=0), Draw(at=1, temperature=0.7, top_p=0.8, top_k=20, uniform=0.3)]
    draws.append(Draw(at=2, temperature=1.0, uniform=0.6, output=bytes(8), presence_penalty=1.0))
    before = torch.zeros(1, dtype=torch.int64)
    given = gpu_sampler.draw(logits.to(here.device), draws, before.to(here.device)).result().tokens
    expected = sampler.draw(logits, draws, before).result().tokens
    assert given == expected, f"{given} instead of {expected}"


def _tower_attention(here: Place, name: str) -> Trial | None:
    from encoder_service.models.attention import BACKENDS, Sdpa, candidates

    if name not in candidates(here.device, here.dtype) and here.device.type == "cuda":
        raise LookupError(f"{name} is not installed")
    if name == "flash" and here.tiny:
        return None
    lengths = [20, 4, 40] if here.tiny else [1024, 4, 300, 2047]
    q, k, v = here.drawn(sum(lengths), 3, 4 if here.tiny else 16, 72).unbind(1)
    segments = BACKENDS[name]().over(lengths, here.device)
    return Trial(lambda: segments(q, k, v), Sdpa().over(lengths, here.device)(q, k, v))


def _tower_rotary(here: Place) -> Trial:
    from common.media.item import Grid
    from encoder_service.models import blocks, rotary_kernel
    from encoder_service.models.tower import rotary

    side = 4 if here.tiny else 64
    table = rotary([Grid(1, side, side)], 2, 72, 10_000.0, here.device)
    x = here.drawn(side * side, 32, 72)
    return Trial(lambda: rotary_kernel.turn(x, table, fresh=True), blocks.apply_rotary(x, table))


def _pixels(here: Place) -> None:
    from testkit import pixel_cases

    sizes = ((1, 60, 80), (28, 56)) if here.tiny else ((1, 3024, 4032), (1036, 1400))
    pixel_cases.check_resize(*sizes, here.device.type)
    pixel_cases.check_patches(14, 2, 1, here.dtype, here.device.type)


def _product(form: str, rows: int) -> Callable[[Place], Trial]:
    def made(here: Place) -> Trial:
        side = 256 if here.tiny else 4096
        weight = FORMS[form](torch.randn(side, side, device=here.device) * side**-0.5)
        laid_out = _laid_out([weight])
        x = here.drawn(4 if here.tiny else rows, side)
        expected = x.float() @ weight.wide().float().T
        return Trial(lambda: laid_out.product(x), expected, _ROUNDED if weight.rounds_inputs else 0.0)

    return made


def _grouped(form: str) -> Callable[[Place], Trial]:
    def made(here: Place) -> Trial:
        outputs, inputs, counts = (128, 128, (3, 0, 5)) if here.tiny else (768, 2048, (300, 0, 1, 63, 900))
        each = [FORMS[form](torch.randn(outputs, inputs, device=here.device) * inputs**-0.5) for _ in counts]
        laid_out = _laid_out(each, experts=True)
        x = here.drawn(sum(counts), inputs)
        ends = torch.tensor(counts, device=here.device).cumsum(0).int()
        parts = zip(x.float().split(list(counts)), each, strict=True)
        expected = torch.cat([part @ one.wide().float().T for part, one in parts])
        return Trial(lambda: laid_out.grouped_product(x, ends), expected, _ROUNDED)

    return made


def _laid_out(each: Sequence[QuantizedWeight], *, experts: bool = False) -> GpuWeight | Int8Weight:
    """For kernels of ours. Raises AssertionError where a trial of any has failed: another way would compute the same,
    and hide it."""
    from llm_service.layers.gpu import scaled_weight
    from llm_service.layers.gpu.int8_weight import Int8Weight
    from llm_service.layers.gpu.quantized_weight import GpuWeight

    first, stacks = each[0], [[one] for one in each]
    made = Int8Weight.of_experts(stacks) if experts else Int8Weight.of(each)
    if made is not None:
        return made
    found = GpuWeight.of_experts(stacks) if experts else GpuWeight.of(each)
    assert found is not None, "there is no kernel for it here"
    short = first.rounds_inputs and scaled_weight.runs_on(first.codes.device)
    assert not first.rounds_inputs or first.number is not Number.INT8, "products of int8 fail their trial"
    assert not short or found.scaled or found.scaled_experts, "products of e4m3 fail their trial"
    assert found.few, "our kernel fails its trial"
    return found


def _experts(here: Place) -> Trial:
    from llm_service.layers.gpu import row_ops
    from llm_service.layers.moe.sparse_mlp import SparseMLP
    from llm_service.layers.ops import use_ops
    from llm_service.layers.tensor_parallel import ALONE

    shape = (4, 2, 64, 32) if here.tiny else (128, 8, 2048, 768)
    layer = SparseMLP(*shape, ALONE, here.dtype).requires_grad_(requires_grad=False).to(here.device)
    for parameter in layer.parameters():
        parameter.normal_(std=parameter.shape[-1] ** -0.5)
    use_ops(layer, row_ops)
    x = here.drawn(6 if here.tiny else 64, shape[2])
    weights, chosen = layer.gate(x).float().softmax(-1).topk(shape[1], dim=-1)
    weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
    return Trial(lambda: layer(x), layer._in_turn(x, weights, chosen), 3e-2)


def _adapters(here: Place) -> None:
    from testkit import adapter_cases

    adapter_cases.check_add(16, 300, (70, 20, 20), adapter_cases.BATCHES[1], here.dtype, here.device.type)


def _convolutions(here: Place) -> None:
    from testkit import convolution_cases as cases

    cases.check(cases.Case.drawn((48, 4) if here.tiny else (8192, 4), 71, here.dtype, here.device.type), (1, 70))


def _delta_net(here: Place) -> None:
    from llm_service.layers.gdn.backend import GdnShape
    from llm_service.layers.gdn.triton_backend import TritonBackend
    from testkit import gdn_cases as cases

    shape = GdnShape(2, 4, 32, 16) if here.tiny else GdnShape(16, 32, 128, 128)
    case = cases.Case.drawn(shape, 71, here.dtype, here.device.type)
    cases.check(TritonBackend(shape, here.dtype, here.device), case, (1, 70))


def _mamba2(here: Place) -> None:
    from llm_service.layers.mamba2.backend import Mamba2Shape
    from llm_service.layers.mamba2.triton_backend import TritonBackend
    from testkit import mamba2_cases as cases

    shape = Mamba2Shape(1, 3, 32, 16) if here.tiny else Mamba2Shape(8, 64, 64, 128, least_step=0.001)
    case = cases.Case.drawn(shape, 71, here.dtype, here.device.type)
    cases.check(TritonBackend(shape, here.dtype, here.device), case, (1, 70))


def _kda(here: Place) -> None:
    from llm_service.layers.kda.backend import KdaShape
    from llm_service.layers.kda.triton_backend import TritonBackend
    from testkit import gdn_cases, kda_cases

    shape = KdaShape(2, 32) if here.tiny else KdaShape(32, 128)
    case = kda_cases.Case.drawn(shape, 71, here.dtype, device=here.device.type)
    gdn_cases.check(TritonBackend(shape, here.dtype, here.device), case, (1, 70))


def _latents(here: Place) -> None:
    from llm_service.layers.attention.choose import choose
    from testkit.attention_cases import Case, latents_of

    shape = latents_of() if here.tiny else latents_of(576, 512, heads=64)
    for counts in ((1, 1, 1), (1, 4, 65)):
        Case.random(shape, counts, here.dtype, 1, here.device).check(choose("triton", shape, here.dtype, here.device))


def _index_scores(here: Place) -> None:
    from llm_service.layers.gpu import index_kernels, index_trial
    from llm_service.layers.sparse_attention import block_decodes, token_decodes
    from llm_service.layers.sparse_attention.index import IndexKeys

    heads, width = (3, 20) if here.tiny else (64, 128)
    tokens = IndexKeys(heads, width, width, 16, here.dtype, here.device)
    blocks = IndexKeys(2, width, width, 16, here.dtype, here.device, 32 if here.tiny else 128, weighs=False)
    by_torch = token_decodes.score_by_torch, block_decodes.score_by_torch
    assert index_trial.gives_scores(index_kernels.score_tokens, by_torch[0], tokens), "of tokens"
    assert index_trial.gives_scores(index_kernels.score_blocks, by_torch[1], blocks), "of blocks"


def _steps(here: Place) -> None:
    from benchmarks import shape_cases

    shape_cases.check_graphs_on_random_steps(here.device, "triton", 2 if here.tiny else 20)


def _waits(here: Place) -> None:
    """Decoding and a prompt, once all is compiled: torch warns of every operator that waits for the device."""
    from benchmarks.device import Machine, Peaks

    machine = Machine(here.device, here.dtype, Peaks(1e9, 1e9), Peaks(1e9, 1e9), runs=1)
    runner = make_runner(config_of(2, experts=False, tiny=here.tiny), 64, machine, Settings("triton"))
    waited = list[str]()
    for chunks in ([(20, 1)] * 3, [(0, 100)]):
        plan = step(chunks)
        runner.run(plan)
        plan = msgspec.structs.replace(plan, appended=[])
        if here.device.type != "cuda":
            continue
        with told_waits() as told:
            launched = runner.launch(plan)
        launched.result()
        waited += [Path(each).name for each in told]
    assert not waited, f"the host waits in {', '.join(sorted(set(waited)))}"


def _far(found: Tensor, expected: Tensor) -> float:
    """Of the length of what is expected; torch's not-a-number passes no comparison."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@torch.inference_mode()
def tried(make: Callable[[Place], Trial | None], here: Place, capture: Callable[[], Capture] | None) -> str:
    """How a kernel did; raises whatever goes wrong. Without `capture` it is launched once."""
    trial = make(here)
    if trial is None:
        return "as torch"
    most = trial.far or _FAR[here.dtype]
    found = trial.run()
    apart = _far(found, trial.expected)
    assert apart <= most, f"{apart:.1e} of its length apart from torch's"
    if capture is None:
        return f"{apart:.1e} apart"
    out = torch.zeros_like(found)

    def again() -> None:
        out.copy_(trial.run())

    replay = capture()(again)
    out.zero_()
    replay()
    later = _far(out, trial.expected)
    assert later <= most, f"{later:.1e} of its length apart from torch's, but only once it is replayed"
    return f"{apart:.1e} apart, replayed {later:.1e}"


def run(here: Place, begin: int, progress: Path | None, *, once: bool) -> Iterator[str]:
    """A line for each kernel from `begin` on; names of those that failed come last, if any. The number of the one that
    is tried is in `progress`."""
    for number, (name, make) in enumerate(trials().items()):
        if number < begin or (once and name == _GRAPHS):
            continue
        if progress is not None:
            progress.write_text(str(number))
            if not here.tiny:  # an interpreter takes its time
                faulthandler.dump_traceback_later(_SECONDS, exit=True)
        capture = None if once else (lambda: CudaCapture(here.device)) if here.device.type == "cuda" else Again
        try:
            said = tried(make, here, capture)
        except LookupError as error:
            said = f"left out: {error}"
        except CaptureFailed as error:
            said = f"FAILED to be captured: {error}"
        except Exception as error:  # noqa: BLE001 - whatever it is, the next one may do
            first = first_of(error)
            said = f"FAILED: {type(first).__name__}: {str(first).strip()[:300]}"
        yield f"{name}: {said}"
        if here.device.type == "cuda":
            torch.cuda.synchronize(here.device)  # a device that is of no use any more ends this process


def _processes(options: Sequence[str]) -> list[int]:
    """Runs all in as many processes as it takes; numbers of those in which one ended, and one more where others
    failed."""
    ended, begin, count = list[int](), 0, len(trials())
    with tempfile.TemporaryDirectory() as folder:
        progress = Path(folder) / "progress"
        while begin < count:
            own = ["--begin", str(begin), "--progress", str(progress)]
            code = subprocess.call([sys.executable, "-m", "benchmarks.kernels_device", *options, *own])
            if not progress.exists():
                sys.exit("no process begins here")
            if code in (0, _FAILED):
                return ended if code == 0 else [*ended, count]
            ended.append(int(progress.read_text()))
            print(f"{list(trials())[ended[-1]]}: FAILED: its process ended with code {code}", flush=True)
            begin = ended[-1] + 1
    return ended


def main() -> None:
    """The exit code is 1 where one failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels_device", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="small shapes; on CPUs as well, in Triton's interpreter")
    parser.add_argument("--once", action="store_true", help="a single launch of each, in this process")
    parser.add_argument("--begin", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--progress", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not given.once and given.progress is None:
        sys.exit(bool(_processes(["--tiny"] if given.tiny else [])))
    gpu = torch.cuda.is_available()
    if not gpu and not given.tiny:
        parser.error("torch sees no GPU here")
    if not gpu:
        if triton_interpreter.is_too_old():
            triton_interpreter.mend()
        triton_interpreter.quicken()
    torch.manual_seed(0)
    here = Place(torch.device("cuda:0" if gpu else "cpu"), torch.bfloat16 if gpu else torch.float32, tiny=given.tiny)
    if gpu:
        use_gpu(here.device)
    failed = False
    for said in run(here, given.begin, given.progress, once=given.once):
        print(said, flush=True)
        failed |= "FAILED" in said
    sys.exit(_FAILED if failed else 0)


if __name__ == "__main__":
    main()
