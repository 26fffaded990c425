"""Python imports this in every process that has this folder on its path; see `tests.device_twin.environ`.

Whoever collects tests may import it as well: without the twin's name in the environment it does nothing.
"""

import os

from common import hardware

if "TWIN_DEVICE" in os.environ:
    hardware.MEMORY_DRIVERS["cpu"] = "tests.device_twin:TwinMemory"
