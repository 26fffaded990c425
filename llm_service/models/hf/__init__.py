"""Texts that the library computes, over our KV blocks."""
