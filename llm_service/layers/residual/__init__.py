"""Residual connections other than sums: several residual streams (hyper-connections, manifold-constrained ones, AltUp),
and gates."""
