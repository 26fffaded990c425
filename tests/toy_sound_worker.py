"""A device worker of `tests.toy_sound`: `python -m tests.toy_sound_worker LINK_FD STAGING_FD STORE_FD`."""

from __future__ import annotations

import sys

from encoder_service.worker.__main__ import main
from tests.toy_sound import register

if __name__ == "__main__":
    register()
    main(*map(int, sys.argv[1:4]))
