"""The engine: it decides what is computed when, and keeps what was. It has no torch."""
