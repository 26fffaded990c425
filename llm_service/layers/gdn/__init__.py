"""Gated delta nets: linear attention over a state of a fixed size (Yang, Kautz and Hatamizadeh 2024)."""
