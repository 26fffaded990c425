"""Light services: both real services, but for what computes in them, which takes a second to start in place of six.

Everything that is about protocol, faults, transports, leases, limits, security, tracing or metrics is in the fronts,
the decode processes, the scheduler and the shared memory between them, and all of these are the real ones here. What
they have computed is done without torch and weights: a row is drawn from a hash of the pixels that it was made of, a
token from a hash of everything before it: tokens, positions, and the bytes of its media's rows. So a picture that is
mixed up with another one, a row that is read before it has landed, a block with somebody else's tokens, or a chunk at
the wrong place gives another answer than the undisturbed request has, as it does with a real model.

`python -m testkit.light.encoder` and `python -m testkit.light.llm` take the options of the real services and a real
checkpoint, of which they read no weights but to hash them.
"""
