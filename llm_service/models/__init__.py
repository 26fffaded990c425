"""Text decoders, one small file for each family."""
