"""What distinguishes families of models: one file each, without torch, and a row in the registry."""
