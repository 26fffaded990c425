"""Mamba-2: state space layers with one decay for each head (Dao and Gu 2024)."""
