"""Towers that transformers computes, with some parts replaced by our kernels."""
