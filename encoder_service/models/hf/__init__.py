"""Towers that the library computes, and which of their parts our kernels take over."""
