"""Sparse attention: an indexer scores earlier tokens, and a token attends only to the best. It chooses tokens (DeepSeek
Sparse Attention), pools of tokens (GLM-5 Next), blocks (MiniMax M3) or stretches (Qwen4). For each there is an indexer,
which makes queries and keys; *batches* for chunks of prompts; and *decodes*, which follow metadata in graphs."""
