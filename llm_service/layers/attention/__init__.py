"""Attention over the paged KV cache: one small protocol, and the back ends behind it."""
