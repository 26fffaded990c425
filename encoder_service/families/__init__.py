"""Vision families, described without torch: a file each, and a row in `config`."""
