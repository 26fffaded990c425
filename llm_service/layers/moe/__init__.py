"""Mixtures of experts: routers, experts, shared experts, and families' variants."""
