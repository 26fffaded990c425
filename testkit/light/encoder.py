"""`python -m testkit.light.encoder`: the encoder service with light device workers."""

from __future__ import annotations

from encoder_service.__main__ import main

if __name__ == "__main__":
    main(worker="testkit.light.worker")
