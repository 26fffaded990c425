"""The text decoder: its weights and its computation."""
