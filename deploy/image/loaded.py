"""Loads what the services load, in the build of the image: Python then leaves the bytecode of just these modules.

A package that is not installed here, as those for GPUs, is left out; one that should be there fails the build.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

SERVICES = """
    PIL.GifImagePlugin PIL.Image PIL.ImageOps PIL.JpegImagePlugin PIL.PngImagePlugin PIL.WebPImagePlugin
    av decord google_crc32c llguidance msgspec numpy safetensors tokenizers torch torch.distributed uvloop
    valkey.asyncio
    google.protobuf.json_format google.rpc.code_pb2 google.rpc.error_details_pb2 google.rpc.status_pb2
    grpc.aio grpc_health.v1.health grpc_reflection.v1alpha.reflection
    httpcore2 httpx2 huggingface_hub jinja2.sandbox prometheus_client.openmetrics.exposition structlog
"""
GATEWAY = "anyio httptools pydantic starlette.applications starlette.middleware.cors uvicorn"
TRACING = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter opentelemetry.sdk.trace.export"
GPU = "flash_attn fla triton"


def main() -> None:
    """Imports them all, and has numba compile something, for which it loads the rest of itself."""
    for name in f"{SERVICES} {GATEWAY} {TRACING}".split():
        importlib.import_module(name)
    for name in GPU.split():
        if importlib.util.find_spec(name):
            try:
                importlib.import_module(name)
            except (ImportError, RuntimeError) as error:  # some want to see a GPU
                sys.stderr.write(f"{name} is not loaded here: {error}\n")
    numba, numpy = importlib.import_module("numba"), importlib.import_module("numpy")
    numba.njit(lambda numbers: numbers.sum())(numpy.ones(4))


if __name__ == "__main__":
    main()
