"""What users of Twinlens import: the client, its errors, and the generated stubs in `twinlens.v1`."""

from twinlens._version import __version__

__all__ = ["__version__"]
