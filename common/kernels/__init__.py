"""Kernels in Triton. Imported where they are used, never by what must run without a GPU."""
