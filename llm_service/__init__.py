"""The LLM service: prompts with media in, streamed tokens out."""
