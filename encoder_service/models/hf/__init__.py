"""Towers that transformers computes, and which of their parts our kernels take over."""
