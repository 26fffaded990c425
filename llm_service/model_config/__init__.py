"""A text decoder's shape, and an adapter's, as files say it: no torch."""
