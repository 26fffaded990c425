"""Models of Hugging Face transformers: what is asked of it, and what it says."""
