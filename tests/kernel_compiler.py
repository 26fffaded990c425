"""`python -m tests.kernel_compiler [--first] CAPABILITY TYPES [TYPES] [--only NAME …]`: compiles our Triton kernels for
a GPU that is not here, in these types, as `bfloat16,float32`, and those of layers with states in the last ones, where
there are any; with `--first`, each in the first of its forms alone, and with `--only`, the forms of these names.

Down to machine code, which Triton's own assembler makes without a driver. Prints one JSON object: of each kernel, the
bytes of shared memory that it takes, those that one thread keeps on its stack, whether it copies while it computes, the
registers of a thread, and the instruction of tensor cores that multiplies.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from encoder_service.models import rotary_kernel, varlen_attention
from encoder_service.worker import pixel_kernels
from llm_service.families.sight import Sight
from llm_service.layers.attention import triton_kernels
from llm_service.layers.attention.backend import CAUSAL, AttentionKind, CacheShape
from llm_service.layers.attention.kernel_backend import COMBINED
from llm_service.layers.attention.latent_triton import LatentKernelShape
from llm_service.layers.attention.triton_backend import KernelShape
from llm_service.layers.gdn.backend import GdnShape
from llm_service.layers.gdn.triton_backend import INVERT, KernelConstants
from llm_service.layers.gpu import (
    gdn_kernels,
    index_kernels,
    int8_kernels,
    int8_weight,
    kda_kernels,
    latent_kernels,
    lora_kernels,
    mamba2_kernels,
    part_kernels,
    quantized_kernel,
    routing_kernels,
    scaled_kernel,
    scaled_weight,
)
from llm_service.layers.gpu import quantized_weight as weights_gpu
from llm_service.layers.gpu import row_kernels as rows_gpu
from llm_service.layers.gpu import sampling_kernels as sampling
from llm_service.layers.gpu.convolutions import CHANNELS, RUN_CHANNELS
from llm_service.layers.kda.backend import KdaShape
from llm_service.layers.kda.triton_backend import KdaConstants
from llm_service.layers.linear.quantized_weight import Number
from llm_service.layers.mamba2.backend import Mamba2Shape
from llm_service.layers.mamba2.triton_backend import Mamba2Constants
from llm_service.layers.recurrent.backend import CHUNK
from llm_service.settings import CacheDtype
from llm_service.worker import gpu_sampler

_FIXED = {
    "codes": "*u8",
    "levels": "*fp32",
    "zeros": "*u8",
    "units": "*fp32",
    "groups": "*i32",
    "ends": "*i32",
    "counts": "*i32",
    "masks": "*u8",
    "table": "*fp64",
    "tokens": "*i64",
    "places": "*i64",
    "scale": "fp32",
    "eps": "fp32",
}
"""What parameters of these names are, whatever a model's type."""
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_HEADS = {torch.bfloat16: 128, torch.float16: 64, torch.float32: 80}
_INTEGERS = ("slots", "block_table", "lengths", "starts", "tiles", "steps", "runs", "parts", "split", "rooms")
_INTEGERS += ("prompts",)
_POINTERS = ("out", "mixtures", "maxima", "sums", "query", "key", "value", "keys", "values", "x", "cosine", "sine")
_POINTERS += ("key_scales", "value_scales")
_POINTERS += (
    "gain",
    "query_gain",
    "key_gain",
    "mixed",
    "qkv",
    "z",
    "a",
    "b",
    "convolution",
    "conv",
    "bias",
    "a_log",
    "dt_bias",
    "logits",
    "more",
    "total",
)
_ALIGNED = ("query_stride", "key_stride", "value_stride", "width", "n", "k", "row", "size", "inner")
_ALIGNED += ("stride", "vocabulary", "query_row", "key_row", "value_row", "out_row", "qkv_row", "z_row", "channels")
_ALIGNED += ("more_row", "x_row", "inputs", "outputs")

_PRODUCTS = ("tcgen05", "wgmma", "mma.sync")
"""Instructions of tensor cores, the newest first: Blackwell's, Hopper's, and those of all since Volta."""

Needs = tuple[int, int, bool, int, str]
"""Bytes of shared memory, those of one thread's stack, whether there are asynchronous copies, a thread's registers, and
the one of `_PRODUCTS` that there is, or nothing."""


@dataclass(frozen=True, slots=True)
class Form:
    """A kernel with the types, constants and options that it is compiled with."""

    source: ASTSource
    capability: int
    options: dict[str, int]

    def compile(self) -> Needs:
        made = triton.compile(self.source, target=GPUTarget("cuda", self.capability, 32), options=self.options)
        stack, registers = _usage(made.asm["cubin"])
        text = made.asm["ptx"]
        product = next((each for each in _PRODUCTS if each in text), "")
        return int(made.metadata.shared), stack, "cp.async" in text, registers, product


def form(
    capability: int,
    kernel: Any,
    dtype: torch.dtype,
    wide: tuple[str, ...] = (),
    types: dict[str, str] | None = None,
    **given: Any,
) -> Form:
    """`given` are constants and options; `wide` names pointers to float32, `types` says those of others."""
    options = {name: given.pop(name) for name in ("num_warps", "num_stages") if name in given}
    signature: dict[str, str] = {}
    for name in kernel.arg_names:
        if name in given:
            signature[name] = "constexpr"
        elif types and name in types:
            signature[name] = types[name]
        elif name in _INTEGERS:
            signature[name] = "*i32"
        elif name in wide:
            signature[name] = "*fp32"
        elif name in _FIXED:
            signature[name] = _FIXED[name]
        else:
            signature[name] = f"*{_NAMES[dtype]}" if name in _POINTERS else "i32"
    aligned = [n for n, name in enumerate(kernel.arg_names) if signature[name].startswith("*") or name in _ALIGNED]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(name),): value for name, value in given.items()},
        attrs={(n,): [["tt.divisibility", 16]] for n in aligned},
    )
    return Form(source, capability, options)


def _usage(cubin: bytes) -> tuple[int, int]:
    """Bytes of a thread's stack, where registers are spilled to as well, and its registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        usage = subprocess.check_output([tool, "--dump-resource-usage", file.name], text=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return int(found[2]), int(found[1])


def attention(capability: int, dtype: torch.dtype, head_dim: int) -> dict[str, Form]:
    """As `TritonBatch` launches them; masks of Llama 4 and DeepSeek-OCR with their heads alone, of 128."""
    shape = KernelShape.of(CacheShape(1, 1, 16, 8, 2, head_dim), dtype)
    windowed = replace(shape, window=1024)
    same = {"BLOCK_SIZE": 16, "BLOCK_N": shape.keys_at_once, "PRECISION": shape.precision, **_PLAIN}
    sums, kernel = ("mixtures", "maxima", "sums"), triton_kernels.attention_kernel
    joined = {"TOKENS": 1, "GROUP": shape.group, "HEAD_DIM": head_dim, "DIMS": shape.dims, "PARTS": COMBINED}
    made = {
        "store": form(capability, triton_kernels.store_kernel, dtype, **_STORED, FP8=False, SCALED=False),
        "decode": form(capability, kernel, dtype, sums, **same, **shape.rows(1)),
        "verify": form(capability, kernel, dtype, sums, **same, **shape.rows(5)),
        "combine": form(capability, part_kernels.combine_kernel, dtype, sums, **joined, num_warps=4),
        "prefill": form(capability, kernel, dtype, sums, **same, **shape.rows(shape.tile)),
        "windows": form(capability, kernel, dtype, sums, **same, **windowed.rows(shape.tile)),
    }
    if head_dim == 128:
        chunked, answers = replace(shape, chunk=8192), replace(shape, window=128, prompts=True)
        made["chunks"] = form(capability, kernel, dtype, sums, **same, **chunked.rows(shape.tile))
        made["answers"] = form(capability, kernel, dtype, sums, **same, **answers.rows(1))
        made["prompts"] = form(capability, kernel, dtype, sums, **same, **answers.rows(shape.tile))
    return made


def e4m3_blocks(capability: int) -> dict[str, Form]:
    """Attention over keys and values of e4m3 with scales, in bfloat16, as `TritonBatch` launches it."""
    shape = KernelShape.of(CacheShape(1, 1, 16, 8, 2, 128, kept=CacheDtype.FP8), torch.bfloat16)
    same = {
        "BLOCK_SIZE": 16,
        "BLOCK_N": shape.keys_at_once,
        "PRECISION": shape.precision,
        "INT8": False,
        "SCALED": True,
    }
    kernel, sums, types = triton_kernels.attention_kernel, ("mixtures", "maxima", "sums"), _IN_8_BITS | _OF_E4M3
    made = {
        f"e4m3 {name}": form(capability, kernel, torch.bfloat16, sums, types, **same, **shape.rows(tokens))
        for name, tokens in (("decode", 1), ("verify", 5), ("prefill", shape.tile))
    }
    store = triton_kernels.store_kernel
    for scaled in (False, True):
        name = "e4m3 store, scaled" if scaled else "e4m3 store"
        made[name] = form(capability, store, torch.bfloat16, types=_OF_E4M3, **_STORED, FP8=True, SCALED=scaled)
    return made


_OF_E4M3 = {"keys": "*fp8e4nv", "values": "*fp8e4nv", "scales": "*fp32"}
_STORED = {"WIDTH": 256, "HEAD_DIM": 128}
_PLAIN = {"INT8": False, "SCALED": False}


def int8_blocks(capability: int) -> dict[str, Form]:
    """Attention over keys and values in 8 bits, in bfloat16, as `TritonBatch` launches it."""
    shape = KernelShape.of(CacheShape(1, 1, 16, 8, 2, 128, kept=CacheDtype.INT8), torch.bfloat16)
    same = {
        "BLOCK_SIZE": 16,
        "BLOCK_N": shape.keys_at_once,
        "PRECISION": shape.precision,
        "INT8": True,
        "SCALED": False,
    }
    kernel, sums = triton_kernels.attention_kernel, ("mixtures", "maxima", "sums")
    made = {
        f"int8 {name}": form(capability, kernel, torch.bfloat16, sums, _IN_8_BITS, **same, **shape.rows(tokens))
        for name, tokens in (("decode", 1), ("verify", 5), ("prefill", shape.tile))
    }
    capped = replace(shape, softcap=50.0).rows(shape.tile)
    made["int8 capped"] = form(capability, kernel, torch.bfloat16, sums, _IN_8_BITS, **same, **capped)
    store, sizes = triton_kernels.store_int8_kernel, {"HEADS": 2, "HEAD_DIM": 128, "DIMS": 128, "BLOCK_SIZE": 16}
    return made | {"int8 store": form(capability, store, torch.bfloat16, types=_IN_8_BITS, **sizes)}


_IN_8_BITS = {"keys": "*i8", "values": "*i8", "key_scales": "*fp32", "value_scales": "*fp32"}


def wide_heads(capability: int, head_dim: int, group: int) -> dict[str, Form]:
    """Attention of heads above 128 in bfloat16, as `TritonBatch` launches it."""
    shape = KernelShape.of(CacheShape(1, 1, 16, group, 1, head_dim), torch.bfloat16)
    same = {"BLOCK_SIZE": 16, "BLOCK_N": shape.keys_at_once, "PRECISION": shape.precision, **_PLAIN}
    kernel, sums = triton_kernels.attention_kernel, ("mixtures", "maxima", "sums")
    return {
        name: form(capability, kernel, torch.bfloat16, sums, **same, **each.rows(tokens))
        for name, each, tokens in (
            ("decode", shape, 1),
            ("prefill", shape, shape.tile),
            ("windows", replace(shape, window=1024), shape.tile),
            ("capped decode", replace(shape, softcap=50.0), 1),
            ("capped windows", replace(shape, window=1024, softcap=50.0), shape.tile),
        )
    }


def latents(capability: int, dtype: torch.dtype) -> dict[str, Form]:
    """Attention over latents of 512 and 64 numbers, as DeepSeek-V3 has them, and of 512 alone, as `LatentTritonBatch`
    launches it, and scores of indices of DeepSeek-V3.2's size and MiniMax M3's."""
    shape = LatentKernelShape.of(CacheShape(1, 1, 16, 64, 1, 576, CAUSAL, 512), dtype)
    kernel, sums = latent_kernels.latent_kernel, ("mixtures", "maxima", "sums", "sinks")
    made = {
        f"latent {name}": form(capability, kernel, dtype, sums, SINKS=sinks, **shape.constants(tokens))
        for name, tokens, sinks in (
            ("decode", 1, False),
            ("verify", 5, False),
            ("prefill", shape.tile, False),
            ("decode with sinks", 1, True),
            ("prefill with sinks", shape.tile, True),
        )
    }
    plain = LatentKernelShape.of(CacheShape(1, 1, 16, 64, 1, 512, CAUSAL, 512), dtype)
    made["plain latent decode"] = form(capability, kernel, dtype, sums, SINKS=False, **plain.constants(1))
    score, types = index_kernels.score_tokens_kernel, {"weights": "*fp32", "out": "*fp32"}
    for name, pooled in (("token scores", {}), ("pool scores", {"kept": 256, "pool": 16})):
        constants = index_kernels.constants(64, 128, 64, dtype, **pooled)
        made[name] = form(capability, score, dtype, types=types, **constants)
    blocks = index_kernels.block_constants(4, 128, 128, 64, dtype)
    made["block scores"] = form(capability, index_kernels.score_blocks_kernel, dtype, types=types, **blocks)
    return made | {"latent store": form(capability, latent_kernels.store_latents_kernel, dtype, WIDTH=1024)}


def wide_latents(capability: int) -> dict[str, Form]:
    """The same over latents of 1024 numbers within windows, in bfloat16, as dots3-note has them."""
    seen = AttentionKind(Sight(window=512))
    shape = LatentKernelShape.of(CacheShape(1, 1, 16, 64, 1, 1088, seen, 1024), torch.bfloat16)
    kernel, sums = latent_kernels.latent_kernel, ("mixtures", "maxima", "sums", "sinks")
    return {
        f"wide latents {name}": form(capability, kernel, torch.bfloat16, sums, SINKS=False, **shape.constants(tokens))
        for name, tokens in (("decode", 1), ("prefill", shape.tile))
    }


def vision(capability: int, dtype: torch.dtype, head: int) -> dict[str, Form]:
    """As the towers launch their attention, over whole pictures and over windows, and their rotary positions."""
    kernel = varlen_attention._varlen_attention
    same = dict.fromkeys(("QUERY_HEAD", "KEY_HEAD", "VALUE_HEAD", "OUT_HEAD"), head) | {"WIDEN": False}
    made = {
        f"vision {rows}": form(capability, kernel, dtype, **varlen_attention.launch(head, dtype, rows), **same)
        for rows in (64, 128)
    }
    turn, angles = rotary_kernel.rotary_kernel, ("cosine", "sine")
    for name, given in (("vision rotary", 0), ("vision rotary of transformers", head)):
        made[name] = form(capability, turn, dtype, angles, **rotary_kernel.constants(32, head, given), num_warps=4)
    return made


def pixels(capability: int, dtype: torch.dtype) -> dict[str, Form]:
    """As `PatchWriter` launches them, of patches of Qwen3-VL."""
    resized = dict.fromkeys(("x", "out"), "*u8") | dict.fromkeys(("first", "weight"), "*i32")
    cut = {"x": "*u8", "table": f"*{_NAMES[dtype]}"}
    line, column, patch = pixel_kernels.line_kernel, pixel_kernels.column_kernel, pixel_kernels.patch_kernel
    return {
        "resize along lines": form(capability, line, dtype, types=resized, **pixel_kernels.LINE),
        "resize along columns": form(capability, column, dtype, types=resized, **pixel_kernels.COLUMN),
        "patches": form(capability, patch, dtype, types=cut, **pixel_kernels.constants(16, 2, 2)),
    }


def rows(capability: int, dtype: torch.dtype, head: int) -> dict[str, Form]:
    """As the decoder launches them, 4096 wide."""
    gates = {"BLOCK": rows_gpu._GATES, "num_warps": 4}
    heads = {"NORM": True, "HEAD": head, "ROTARY": head, "DIMS": triton.next_power_of_2(head), "PART": rows_gpu._HEADS}
    return {
        "norm": form(capability, rows_gpu.norm_kernel, dtype, ADD=False, BLOCK=4096, num_warps=8),
        "add and norm": form(capability, rows_gpu.norm_kernel, dtype, ADD=True, BLOCK=4096, num_warps=8),
        "turn": form(capability, rows_gpu.qk_norm_rotary_kernel, dtype, **heads, num_warps=4),
        "gate": form(capability, rows_gpu.gate_kernel, dtype, GELU=True, ENDS=0, **gates),
        "gate of some experts": form(capability, rows_gpu.gate_kernel, dtype, GELU=False, ENDS=16, **gates),
    } | {**routing(capability, dtype), **adapters(capability, dtype)}


def adapters(capability: int, dtype: torch.dtype) -> dict[str, Form]:
    """Of rank 64, the most of a rank that one program takes."""
    launch, types = lora_kernels.AdapterLaunch.of(64, dtype), dict.fromkeys(("rows", "ranks", "blocks"), "*i32")
    types["parts"] = "i32"
    made = {
        "shrink": (lora_kernels.shrink_kernel, launch.shrink),
        "expand": (lora_kernels.expand_kernel, launch.expand),
    }
    return {
        name: form(capability, kernel, dtype, ("between", "scales"), types, **given)
        for name, (kernel, given) in made.items()
    }


def routing(capability: int, dtype: torch.dtype) -> dict[str, Form]:
    """Of 128 experts, eight of which each row goes to."""
    whole = {"rows": "*i32", "places": "*i32", "chosen": "*i32", "weights": f"*{_NAMES[dtype]}"}
    sizes, block = {"PER_TOKEN": 8}, {"BLOCK": routing_kernels._BLOCK, "num_warps": 4}
    made = {
        "route": (routing_kernels.route_kernel, {"WIDTH": 8, "BLOCK": 128, "num_warps": 1}),
        "sort": (routing_kernels.sort_kernel, block),
        "sort of int64": (routing_kernels.sort_kernel, block),
        "weighted sum": (routing_kernels.weighted_sum_kernel, block),
    }
    long = {"sort of int64": {"chosen": "*i64"}}  # what routers of groups choose by torch's top-k
    return {
        name: form(capability, kernel, dtype, (), whole | long.get(name, {}), **sizes, **given)
        for name, (kernel, given) in made.items()
    }


def delta_net(capability: int, dtype: torch.dtype) -> dict[str, Form]:
    """As `TritonBatch` of gated delta nets launches them, with the heads of a model of 4 B."""
    shape = GdnShape(16, 32, 128, 128)
    launch = KernelConstants(shape, dtype == torch.float32)
    width, tile = {"WIDTH": shape.width, "num_warps": 4}, {"TILE": CHUNK, "num_warps": 4}
    plain = {"BIAS": False, "SILU": True}
    sizes = {"VALUE_DIM": shape.value_dim, "VALUES": launch.values}
    made = {
        "conv step": (gdn_kernels.conv_step_kernel, {**width, **plain, "BLOCK": CHANNELS}),
        "conv run": (gdn_kernels.conv_run_kernel, {**width, **plain, **tile, "BLOCK": RUN_CHANNELS}),
        "conv keep": (gdn_kernels.conv_keep_kernel, {**width, "BLOCK": CHANNELS}),
        "step": (gdn_kernels.step_kernel, launch.step),
        "system": (gdn_kernels.system_kernel, launch.system),
        "invert": (gdn_kernels.invert_kernel, {"HEADS": shape.value_heads, **INVERT}),
        "scan": (gdn_kernels.scan_kernel, launch.scan),
        "norm gate": (gdn_kernels.norm_gate_kernel, {**tile, **sizes}),
    }
    wide = ("recurrent", "system", "inverse", "within")
    return {name: form(capability, kernel, dtype, wide, **given) for name, (kernel, given) in made.items()}


def kimi_delta(capability: int, dtype: torch.dtype) -> dict[str, Form]:
    """As `TritonBatch` of Kimi Delta Attention launches them, with the heads of the published size."""
    shape = KdaShape(64, 128)
    launch, width = KdaConstants(shape, dtype == torch.float32), {"WIDTH": shape.width, "num_warps": 4}
    bounded, plain = {"BOUNDED": True}, {"BIAS": False, "SILU": True}
    made = {
        "conv step": (gdn_kernels.conv_step_kernel, {**width, **plain, "BLOCK": CHANNELS}),
        "conv run": (gdn_kernels.conv_run_kernel, {**width, **plain, "TILE": CHUNK, "BLOCK": RUN_CHANNELS}),
        "step": (kda_kernels.kda_step_kernel, {**launch.step, **bounded}),
        "pairs": (kda_kernels.kda_pairs_kernel, {**launch.pairs, **bounded}),
        "invert": (gdn_kernels.invert_kernel, {"HEADS": shape.heads, **INVERT}),
        "fade": (kda_kernels.kda_fade_kernel, {**launch.fade, **bounded}),
        "scan": (kda_kernels.kda_scan_kernel, launch.scan),
    }
    wide: tuple[str, ...] = "mixed", "conv", "bias", "recurrent", "a_log", "dt_bias", "gain", "system", "inverse"
    wide += "within", "writes", "left"
    types = {"least": "fp32"}
    return {name: form(capability, kernel, dtype, wide, types, **given) for name, (kernel, given) in made.items()}


def mamba2(capability: int, dtype: torch.dtype) -> dict[str, Form]:
    """As `TritonBatch` of Mamba-2 launches them, with the heads of a model of 30 B."""
    shape = Mamba2Shape(8, 64, 64, 128, least_step=0.001)
    launch, width = Mamba2Constants(shape, dtype == torch.float32), {"WIDTH": shape.width, "num_warps": 4}
    biased = {"BIAS": True, "SILU": True}
    made = {
        "conv step": (gdn_kernels.conv_step_kernel, {**width, **biased, "BLOCK": CHANNELS}),
        "conv run": (gdn_kernels.conv_run_kernel, {**width, **biased, "TILE": CHUNK, "BLOCK": RUN_CHANNELS}),
        "step": (mamba2_kernels.mamba2_step_kernel, launch.step),
        "scan": (mamba2_kernels.mamba2_scan_kernel, launch.scan),
        "group norm": (mamba2_kernels.group_norm_kernel, launch.norm),
    }
    wide, types = ("recurrent", "read", "a_log", "dt_bias", "d"), {"answers": "*i32", "least": "fp32"}
    types["dt"] = f"*{_NAMES[dtype]}"
    return {name: form(capability, kernel, dtype, wide, types, **given) for name, (kernel, given) in made.items()}


def short_convolution(capability: int, dtype: torch.dtype) -> dict[str, Form]:
    """As `ConvolutionKernelBatch` launches them, as wide as LFM2's."""
    same = {"WIDTH": 3, "BIAS": False, "SILU": False, "num_warps": 4}
    made = {
        "step": (gdn_kernels.conv_step_kernel, {**same, "BLOCK": CHANNELS}),
        "run": (gdn_kernels.conv_run_kernel, {**same, "TILE": CHUNK, "BLOCK": RUN_CHANNELS}),
    }
    return {name: form(capability, kernel, dtype, **given) for name, (kernel, given) in made.items()}


def sampler(capability: int) -> dict[str, Form]:
    """As `gpu_sampler` launches them."""
    launch = {"BLOCK": gpu_sampler._BLOCK, "num_warps": 8}
    numbers = {"LARGEST": gpu_sampler._NUMBER.max, "SEEN": gpu_sampler._SEEN}
    return {
        "adjust": form(capability, sampling.adjust_kernel, torch.float32, **numbers, **launch),
        "draw": form(capability, sampling.draw_kernel, torch.float32, COUNT=sampling.HEAD, BITS=18, **launch),
    }


def all_forms(capability: int, types: list[torch.dtype], states: list[torch.dtype]) -> dict[str, Form]:
    """Kernels in these types, bfloat16 among them, each with the sizes of head that models have; those of layers with
    states in types of their own."""
    found: dict[str, Form] = {}
    for dtype in types:
        name, head_dim = _NAMES[dtype], _HEADS[dtype]
        made = attention(capability, dtype, head_dim) | vision(capability, dtype, head_dim)
        made |= rows(capability, dtype, head_dim)
        found |= {f"{kernel} {name} {head_dim}": taken for kernel, taken in made.items()}
    found |= {f"{kernel} bf16 72": taken for kernel, taken in vision(capability, torch.bfloat16, 72).items()}
    for head_dim, group in ((256, 2), (512, 8)):
        made = wide_heads(capability, head_dim, group)
        found |= {f"{kernel} bf16 {head_dim}": taken for kernel, taken in made.items()}
    if capability >= 89:  # before, GPUs had no e4m3
        found |= e4m3_blocks(capability)
    found |= int8_blocks(capability) | pixels(capability, torch.bfloat16)
    for dtype in types:
        if dtype != torch.float16:
            found |= {f"{kernel} {_NAMES[dtype]}": taken for kernel, taken in latents(capability, dtype).items()}
    if torch.float32 in types:
        found |= wide_latents(capability)
    for dtype in states:
        found |= {
            f"delta net {kernel} {_NAMES[dtype]}": taken for kernel, taken in delta_net(capability, dtype).items()
        }
        found |= {f"Mamba-2 {kernel} {_NAMES[dtype]}": taken for kernel, taken in mamba2(capability, dtype).items()}
        found |= {f"KDA {kernel} {_NAMES[dtype]}": taken for kernel, taken in kimi_delta(capability, dtype).items()}
        made = short_convolution(capability, dtype)
        found |= {f"short convolution {kernel} {_NAMES[dtype]}": taken for kernel, taken in made.items()}
    return found | sampler(capability) | quantized(capability, torch.bfloat16, torch.float32 in types)


def quantized(capability: int, dtype: torch.dtype, wide: bool) -> dict[str, Form]:
    """As `GpuWeight` launches them: of one row, of as many as go through the kernel at once, of 128 experts. `wide`:
    and in float32."""
    forms = {  # groups of inputs, their size, zeros, the type of scales
        Number.INT8: (True, 1 << 30, 0, "*fp32"),
        Number.E4M3: (False, 128, 0, "*fp32"),
        Number.UINT4: (False, 128, 2, "*fp16"),
        Number.E2M1: (False, 0, 0, "*u8"),
        Number.NF4: (False, 64, 0, "*fp32"),
    }
    found: dict[str, Form] = {}
    for number, (one, columns, zeros, scales) in forms.items():
        same = {"FORM": weights_gpu._FORMS[number], "E4M3_SCALES": scales == "*u8", "ZEROS": zeros}
        name = number.value
        for what, rows, experts in (("one row", 1, 0), ("many rows", 256, 0), ("experts", 16, 128)):
            launch = asdict(weights_gpu.launch_for(rows, 4096, 4096, min(columns, 128) or 64))
            constants = {key.upper(): launch.pop(key) for key in ("rows", "outputs", "inputs", "splits")}
            constants |= {"EXPERTS": experts, "POWER": max(1, experts), "PRECISION": "tf32"}
            constants |= {"ONE": one, "COLUMNS": columns}
            kernel = quantized_kernel.product_kernel
            sums = ("out",) if constants["SPLITS"] > 1 else ()
            types = {"scales": scales}
            found[f"{what}, {name}"] = form(capability, kernel, dtype, sums, types, **same, **constants, **launch)
        if number is Number.INT8 and wide:  # in float32 tiles are the largest
            launch = asdict(weights_gpu.launch_for(40, 4096, 4096, weights_gpu.tile_for(torch.float32, 128)))
            constants = {key.upper(): launch.pop(key) for key in ("rows", "outputs", "inputs", "splits")}
            constants |= {"ONE": one, "COLUMNS": columns, "EXPERTS": 0, "POWER": 1, "PRECISION": "ieee"}
            given, types = {**same, **constants, **launch}, {"scales": scales}
            kernel = quantized_kernel.product_kernel
            found["some rows, int8, fp32"] = form(capability, kernel, torch.float32, ("out",), types, **given)
        if number is not Number.UINT4:
            continue
        outputs, inputs = weights_gpu._WIDEN
        launch = {"OUTPUTS": outputs, "INPUTS": inputs, "num_warps": 4}
        kernel = quantized_kernel.widen_kernel
        found[f"widen, {name}"] = form(capability, kernel, dtype, (), {"scales": scales}, **same, **launch)
    launch = asdict(scaled_weight.ScaledLaunch())
    same = {key.upper(): launch.pop(key) for key in ("rows", "outputs", "inputs")} | {"EXPERTS": 128, "POWER": 128}
    types = {"x": "*fp8e4nv", "scales": "*fp32", "x_scales": "*fp32"}
    for one in (False, True) if capability >= 90 else ():  # where `ScaledExperts` is used
        kernel = scaled_kernel.scaled_product_kernel
        name = f"experts, e4m3 by e4m3, {'one scale' if one else 'blocks'}"
        found[name] = form(capability, kernel, dtype, (), types, ONE=one, **same, **launch)
        written = {"numbers": "*fp8e4nv", "scales": "*fp32"}
        how = {"WIDTH": 0 if one else 128, "BLOCK": scaled_weight._ROUNDED, "ENDS": 0 if one else 128, "num_warps": 8}
        name = f"round to e4m3, {'rows' if one else 'blocks'}"
        found[name] = form(capability, scaled_kernel.round_to_e4m3_kernel, dtype, (), written, **how)
    return found | rounded_rows(capability, dtype)


def rounded_rows(capability: int, dtype: torch.dtype) -> dict[str, Form]:
    """As `Int8Weight` launches them: of the same rows, and of experts with many each."""
    types = {"x_scales": "*fp32", "scales": "*fp32", "steps": "*fp32", "numbers": "*i8", "sums": "*i32"}
    own = {"STEPS": False, "EXPERTS": 0, "POWER": 1}
    stored = {"STEPS": True, "EXPERTS": 128, "POWER": 128}
    own, stored = ({**each, "BLOCK": int8_weight._BLOCK, "num_warps": 8} for each in (own, stored))
    joined = {"BIAS": True, "SPLITS": 4, "BLOCK": int8_weight._JOINED, "num_warps": 4}
    found = {
        "round rows": form(capability, int8_kernels.round_rows_kernel, dtype, (), types, **own),
        "round rows of experts": form(capability, int8_kernels.round_rows_kernel, dtype, (), types, **stored),
        "join sums": form(capability, int8_kernels.int8_join_kernel, dtype, (), types, **joined),
    }
    whole = types | {"x": "*i8", "codes": "*i8"}
    for what, rows, experts in (("one row", 1, 0), ("some rows", 40, 0), ("many rows", 256, 0), ("experts", 100, 128)):
        launch = asdict(int8_weight.launch_for(rows, 4096, 4096))
        constants = {key.upper(): launch.pop(key) for key in ("rows", "outputs", "inputs", "splits")}
        constants |= {"EXPERTS": experts, "POWER": max(1, experts), "BIAS": not experts}
        constants |= {"BESIDE": int8_weight._BESIDE}
        given = whole | ({"out": "*i32"} if constants["SPLITS"] > 1 else {})
        kernel = int8_kernels.int8_product_kernel
        found[f"{what}, int8 by int8"] = form(capability, kernel, dtype, (), given, **constants, **launch)
    return found


def first(forms: dict[str, Form]) -> dict[str, Form]:
    """Of each kernel the form that comes first."""
    found: dict[Any, tuple[str, Form]] = {}
    for name, each in forms.items():
        found.setdefault(each.source.fn, (name, each))
    return dict(found.values())


def main() -> None:
    """The command line of this module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", action="store_true")
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("capability", type=int)
    parser.add_argument("types", type=_types)
    parser.add_argument("states", type=_types, nargs="?", default=[])
    given = parser.parse_args()
    forms = all_forms(given.capability, given.types, given.states)
    wanted = first(forms) if given.first else {name: forms[name] for name in given.only or forms}
    gc.freeze()  # what was imported stays: every compilation makes enough for a look at all that there is
    print(json.dumps({name: each.compile() for name, each in wanted.items()}))


def _types(names: str) -> list[torch.dtype]:
    return [getattr(torch, name) for name in names.split(",")]


if __name__ == "__main__":
    main()
