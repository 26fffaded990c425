"""Python imports this in every process that has this folder on its path; see `tests.tile_twin`.

Whoever collects tests may import it as well: without the twin's library in the environment it does nothing.
"""

import ctypes
import os

if "TWIN_TILES" in os.environ:
    from llvmlite import ir

    from common import hardware
    from common.cpu.vectors import tiles

    ctypes.CDLL(os.environ["TWIN_TILES"], mode=ctypes.RTLD_GLOBAL)

    def _call(builder, name, *given):  # type: ignore[no-untyped-def]
        kinds = [value.type for value in given]
        builder.call(tiles.declared(builder, f"twin_{name}", ir.VoidType(), kinds), given)

    tiles._call = _call
    hardware.multiplies_tiles = hardware.multiplies_byte_tiles = lambda: True
