"""Parts that text decoders share."""
