"""How rows come in: a file for each way."""
