"""Kimi Delta Attention: a gated delta net with a decay for each channel (Kimi Team 2025, Kimi Linear)."""
