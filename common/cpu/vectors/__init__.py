"""Inner loops over vectors of 16 float32, written in LLVM's IR for numba's kernels.

numba keeps no vectors in registers over a loop, and uses vectors of half the processor's width. Kernels that use these
loops are compiled with `made_of` this package, so that their compiled form on disk follows changes here.
"""
