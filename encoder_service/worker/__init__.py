"""The device worker: the process that computes. It decides nothing."""
