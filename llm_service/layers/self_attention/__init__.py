"""Self-attention with heads of keys and values, and what families change of it."""
