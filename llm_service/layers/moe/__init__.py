"""Mixtures of experts: routers, experts, what all tokens share, and what families change of that."""
