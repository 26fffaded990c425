"""A request's life: admitted, prepared, given to the engine, and streamed back."""
