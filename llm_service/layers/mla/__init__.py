"""Multi-head latent attention (MLA): one latent per token is cached, from which all heads make keys and values."""
