"""The asyncio process's side of the engine: starts it, sends it requests, and hands these over when it ends."""
