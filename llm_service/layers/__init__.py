"""Parts that text decoders are made of: decoder layers, their mixers (attention, mla, sparse_attention, layers with a
state) and feed-forward parts (mlp, moe), and what is around them (embeddings, rotary, norms, residual, linear, lora).
`cpu` and `gpu` have kernels for either; a mixer's back ends are chosen in its package."""
