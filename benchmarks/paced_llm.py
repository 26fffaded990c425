"""`python -m benchmarks.paced_llm`: the LLM service with a paced engine, for `benchmarks.gateway`. It measures nothing
by itself."""

from __future__ import annotations

from llm_service.__main__ import main

if __name__ == "__main__":
    main(engine="benchmarks.paced_engine")
