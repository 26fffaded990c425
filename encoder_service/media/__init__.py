"""From encoded bytes to decoded pixels, under limits."""
