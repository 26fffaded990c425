"""Python imports this in every process that has this folder on its path; see `tests.device_twin.environ`.

Whoever collects tests may import it as well: without the twin's name in the environment it does nothing.
"""

import os

from common import devices

if "TWIN_DEVICE" in os.environ:
    devices.MEMORY_DRIVERS["cpu"] = "tests.device_twin:TwinMemory"
