"""The engine: it decides what is computed when, and keeps the results. It does not import torch."""
