"""LoRA: what adapters add to the rows of linear layers."""
