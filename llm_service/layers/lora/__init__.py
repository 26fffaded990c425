"""LoRA: what adapters add to the output of linear layers."""
