"""How many encoders and LLM services a workload needs: a simulation over measured costs (OPERATIONS.md, How many)."""
