"""JSON schemas that answers are held to."""
