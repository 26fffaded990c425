"""Self-attention with heads of keys and values, and families' variants."""
