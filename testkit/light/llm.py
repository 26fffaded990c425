"""`python -m testkit.light.llm`: the LLM service with a light engine."""

from __future__ import annotations

from llm_service.__main__ import main

if __name__ == "__main__":
    main(engine="testkit.light.engine")
