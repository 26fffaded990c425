"""Which of transformers' models are served, and how: tiny random checkpoints of them, and the table of all."""
