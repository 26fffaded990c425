"""Embeddings besides those of tokens: of n-grams, per layer, of marks around media, and of positions."""
