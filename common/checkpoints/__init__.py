"""Reads folders with a model's weights."""
