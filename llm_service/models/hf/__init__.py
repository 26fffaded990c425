"""Texts that transformers computes, over our KV blocks."""
