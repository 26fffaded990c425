"""Structures that answers must have: compiled in processes that may be killed."""
