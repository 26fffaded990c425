"""The gateway: OpenAI's HTTP API in front of LLM services."""
