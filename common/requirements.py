"""Checks whether a program's packages are installed, without importing them, and says how to install them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
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

GATEWAY_MODULES: Final = {
    "googleapis-common-protos": "google.rpc",
    "httptools": "httptools",
    "prometheus-client": "prometheus_client",
    "pydantic": "pydantic",
    "python-multipart": "python_multipart",
    "starlette": "starlette",
    "structlog": "structlog",
    "uvicorn": "uvicorn",
    "uvloop": "uvloop",
}
"""Likewise, of `twinlens[gateway]`."""

_LEAST: Final = (3, 11)
_CHECKOUT: Final = Path(__file__).resolve().parents[1]


def require(program: str, extra: str = "services", modules: Mapping[str, str] = MODULES) -> None:
    """Ends the program with one line if Python is too old, or packages of an extra are missing."""
    if sys.version_info[:2] < _LEAST:
        sys.exit(f"{program}: Python {'.'.join(map(str, _LEAST))} or later is needed")
    if missing := [package for package, module in modules.items() if not _is_here(module)]:
        own = Path(".venv/bin/python")
        other = (
            f", or run it with {own}" if own.exists() and not own.parent.samefile(Path(sys.executable).parent) else ""
        )
        sys.exit(f"{program}: not installed: {', '.join(missing)}. Install them with: {install(extra)}{other}")


def install(extra: str, checkout: Path = _CHECKOUT) -> str:
    """The command that installs an extra: from the checkout that this module lies in, if it does."""
    if not (services := checkout / "wheels" / "services").is_dir():
        return f"pip install 'twinlens[{extra}]'"
    return f"pip install '{checkout}' '{services}{'' if extra == 'services' else f'[{extra}]'}'"


def _is_here(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # or the package around it is missing
        return False
