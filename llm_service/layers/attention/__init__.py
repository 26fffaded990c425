"""Attention over the paged KV cache: a small protocol, and the back ends that implement it."""
