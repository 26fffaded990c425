"""How items of models of transformers are put together to batches, and captured."""
