"""Checks whether the services' packages are installed, without importing them."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Final

MODULES: Final = {
    "av": "av",
    "decord2": "decord",
    "google-crc32c": "google_crc32c",
    "googleapis-common-protos": "google.rpc",
    "grpcio-health-checking": "grpc_health",
    "grpcio-reflection": "grpc_reflection",
    "httpcore2": "httpcore2",
    "httpx2": "httpx2",
    "huggingface-hub": "huggingface_hub",
    "jinja2": "jinja2",
    "llguidance": "llguidance",
    "llvmlite": "llvmlite",
    "msgspec": "msgspec",
    "numba": "numba",
    "numpy": "numpy",
    "pillow": "PIL",
    "prometheus-client": "prometheus_client",
    "safetensors": "safetensors",
    "structlog": "structlog",
    "tokenizers": "tokenizers",
    "torch": "torch",
    "uvloop": "uvloop",
    "valkey": "valkey",
}
"""The packages of `twinlens[services]`, and the module of each that is looked for."""


def require(program: str) -> None:
    """Ends the program with one line if packages of the services are missing."""
    missing = [package for package, module in MODULES.items() if not _is_here(module)]
    if missing:
        sys.exit(f"{program}: not installed: {', '.join(missing)}. Install them with: pip install 'twinlens[services]'")


def _is_here(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # or the package around it is missing
        return False
