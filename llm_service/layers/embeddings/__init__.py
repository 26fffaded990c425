"""Embeddings beside those of tokens: of n-grams, of a token in each layer, of marks around media, of places."""
