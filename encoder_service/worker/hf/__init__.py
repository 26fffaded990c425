"""How items of models of the library are put together to batches, and captured."""
