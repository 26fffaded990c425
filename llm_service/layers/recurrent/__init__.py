"""Layers that read and write a state for each token: what gated delta nets, Kimi Delta Attention, Mamba-2 and short
convolutions share."""
