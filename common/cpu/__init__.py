"""Kernels for CPUs, as both services have them."""
