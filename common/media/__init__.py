"""Media as both services see them: nouns, messages, and content keys."""
