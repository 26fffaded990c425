"""Decides what runs when. Nothing here imports torch."""
