"""Kernels, in Triton for GPUs and in numba for CPUs. Imported where they are used, and nowhere else."""
