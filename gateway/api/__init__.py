"""The surfaces: what each takes, and how it answers."""
