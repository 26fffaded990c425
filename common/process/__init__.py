"""Processes on Linux: children, limits and resources."""
