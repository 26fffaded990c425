"""What a folder with a model's weights holds."""
