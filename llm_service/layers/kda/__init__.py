"""Kimi Delta Attention: a gated delta net each of whose channels fades by itself (Kimi Team 2025, Kimi Linear)."""
