"""Prompts that one service computes for another: KV blocks lent, and brought in."""
