"""Which of the library's models are served, and how: tiny random checkpoints of them, and the table of them all."""
