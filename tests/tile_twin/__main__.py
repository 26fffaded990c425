from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_BUILD = _ROOT / "build" / "tile_twin"
_TESTS = (
    "tests/unit/common/test_tiles.py",
    "tests/unit/encoder_service/test_attention.py",
    "tests/unit/encoder_service/test_fused_block.py",
    "tests/unit/llm_service/test_fused_layer.py",
    "tests/unit/llm_service/test_pair_panels.py",
    "tests/unit/llm_service/test_prefill_attention.py",
    "tests/unit/llm_service/test_quad_panels.py",
    "tests/unit/llm_service/test_quantized_pairs.py",
    "tests/parity/test_bfloat16.py",
    "tests/parity/test_rounded_inputs.py",
)


def main() -> int:
    """The exit code of pytest."""
    compiler = shutil.which("cc")
    if compiler is None:
        sys.exit("there is no C compiler, cc, for the twin of AMX")
    _BUILD.mkdir(parents=True, exist_ok=True)
    library = _BUILD / "tiles.so"
    shared = ("-O3", "-march=native", "-ffp-contract=off", "-shared", "-fPIC")
    subprocess.run([compiler, *shared, "-o", str(library), str(_HERE / "tiles.c")], check=True)
    environ = {
        **os.environ,
        "NUMBA_CACHE_DIR": str(_BUILD / "kernels"),
        "NUMBA_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join((str(_HERE / "site"), str(_ROOT))),
        "TWIN_TILES": str(library),
    }
    command = (sys.executable, "-m", "pytest", *_TESTS, *sys.argv[1:])
    return subprocess.run(command, env=environ, cwd=_ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
