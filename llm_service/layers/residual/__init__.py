"""How what a layer's parts give is added to what goes from layer to layer, other than by a sum: several residual
streams (hyper-connections, manifold-constrained ones, AltUp), and gates."""
