"""What sets families of models apart: one file each, without torch, and a row in the registry."""
