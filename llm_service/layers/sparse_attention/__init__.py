"""Sparse attention: an indexer scores what is before a token, and the token attends to the best alone. Units that are
chosen are tokens (DeepSeek Sparse Attention), pools of tokens (GLM-5 Next), blocks (MiniMax M3) or stretches (Qwen4).
Of each an indexer makes queries and keys; *batches* are of chunks of prompts, *decodes* follow metadata in graphs."""
