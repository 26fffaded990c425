"""Messages into tokens, positions and spans, and tokens back into text."""
