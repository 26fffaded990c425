"""The HTTP surfaces: their requests and responses."""
