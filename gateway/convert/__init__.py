"""Between the HTTP surfaces' nouns and the contract's messages."""
