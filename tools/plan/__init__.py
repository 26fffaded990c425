"""How many encoders and LLM services a workload needs: a simulation (docs/operations/scaling.md)."""
