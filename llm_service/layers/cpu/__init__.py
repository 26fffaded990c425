"""What computes on CPUs: kernels that numba compiles, and weights laid out for them."""
