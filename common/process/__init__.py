"""Processes on Linux: children, and what a process is allowed, takes and leaves behind."""
