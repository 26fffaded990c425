"""Mamba-2: state space layers whose states decay by one number for a head (Dao and Gu 2024)."""
