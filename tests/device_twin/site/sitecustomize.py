"""Python imports this in every process that has this folder on its path; see `tests.device_twin.environ`."""

from common import devices

devices.MEMORY_DRIVERS["cpu"] = "tests.device_twin:TwinMemory"
