"""Inner loops over vectors of 16 float32, written in LLVM's own terms for numba's kernels.

numba has no vectors that stay in registers over a loop, and its compiler takes half of the width that a processor has.
What uses these is compiled with `made_of` this package, so that its compiled form on disk notices changes here.
"""
