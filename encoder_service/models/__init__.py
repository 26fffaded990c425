"""Vision towers, one small file for each family over shared blocks."""
