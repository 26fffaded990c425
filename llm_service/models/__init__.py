"""The text decoder: its shape, its weights and what it computes."""
