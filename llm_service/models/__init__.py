"""The text decoder: its weights and what it computes."""
