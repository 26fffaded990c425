"""What both services say of media: its nouns, its messages, and its content key."""
