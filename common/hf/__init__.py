"""Models of the library, Hugging Face transformers: what is asked of it, and what it says."""
