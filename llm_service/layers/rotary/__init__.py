"""Rotary positions: tables of angles, and families' variants."""
