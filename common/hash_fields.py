"""How fields are put together to be hashed."""

from __future__ import annotations

import json
from typing import Any


def framed(*fields: bytes) -> bytes:
    """Fields joined so that they can be told apart: each after its length."""
    return b"".join(len(field).to_bytes(8, "little") + field for field in fields)


def canonical(value: Any) -> bytes:
    """JSON with sorted keys and no spaces; bytes in hex."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=bytes.hex).encode()
