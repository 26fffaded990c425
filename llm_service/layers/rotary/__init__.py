"""Rotary positions: tables of angles, and what families change of them."""
