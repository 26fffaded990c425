"""Multi-head latent attention (MLA): of a token one latent is cached, of which all heads make keys and values."""
