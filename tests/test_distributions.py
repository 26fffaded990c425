"""What the wheels hold: a client's alone adds one name, and the services' run without the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from email.message import Message
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.launch import ROOT
from twinlens import __version__

SERVICES = {"common", "encoder_service", "llm_service", "gateway"}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both wheels by the names of their distributions."""
    folder = tmp_path_factory.mktemp("wheels")
    build = [
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        folder,
        ROOT,
        ROOT / "wheels/services",
    ]
    subprocess.run([sys.executable, "-m", "pip", *map(str, build)], check=True, timeout=300)
    return {path.name.partition("-")[0]: path for path in folder.iterdir()}


def _files(wheel: Path) -> set[str]:
    names = ZipFile(wheel).namelist()
    return {name for name in names if not name.partition("/")[0].endswith(".dist-info")}


def _metadata(wheel: Path) -> Message:
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def _in_checkout(*folders: str) -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files", *folders], cwd=ROOT, check=True, capture_output=True, text=True, timeout=180
    )
    return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


def test_a_client_s_wheel_adds_one_name_and_needs_two_packages(wheels: dict[str, Path]) -> None:
    protos = {name.removeprefix("proto/") for name in _in_checkout("proto") if name.endswith(".proto")}
    assert _files(wheels["twinlens"]) == _in_checkout("twinlens") | protos
    needed = [each for each in _metadata(wheels["twinlens"]).get_all("Requires-Dist") or () if "extra ==" not in each]
    assert [each.partition(">")[0] for each in needed] == ["grpcio", "protobuf<8,"]


def test_the_services_wheel_holds_all_of_them_and_asks_for_its_own_release(wheels: dict[str, Path]) -> None:
    assert _files(wheels["twinlens_services"]) == _in_checkout(*SERVICES)
    assert f"twinlens=={__version__}" in (_metadata(wheels["twinlens_services"]).get_all("Requires-Dist") or ())
    extras = [each for each in _metadata(wheels["twinlens"]).get_all("Requires-Dist") or () if "extra ==" in each]
    assert {each.partition(";")[0].strip() for each in extras} == {
        f"twinlens-services=={__version__}",
        f"twinlens-services[gateway]=={__version__}",
        f"twinlens-services[tracing]=={__version__}",
        f"twinlens-services[transformers]=={__version__}",
        f"twinlens-services[gpu]=={__version__}",
        f"twinlens-services[nixl]=={__version__}",
        f"twinlens-services[kv-events]=={__version__}",
        f"twinlens-services[heic]=={__version__}",
    }


@pytest.mark.parametrize("program", ["twinlens", *sorted(SERVICES - {"common"})])
def test_programs_run_from_the_wheels_alone(program: str, wheels: dict[str, Path], tmp_path: Path) -> None:
    """The checkout is not on the path of modules: the wheels' folder is before the environment's own."""
    for wheel in wheels.values():
        ZipFile(wheel).extractall(tmp_path)
    look = (
        "import runpy, sys\n"
        f"sys.argv = ['{program}', '--help']\n"
        "try:\n"
        f"    runpy.run_module('{program}', run_name='__main__')\n"
        "finally:\n"
        f"    ours = [m.__file__ for n, m in sys.modules.items() if n.partition('.')[0] in {SERVICES | {'twinlens'}}]\n"
        f"    assert ours and all(file.startswith('{tmp_path}') for file in ours), ours\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", look], cwd="/", env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert (said.returncode, said.stderr) == (0, "")
    assert "usage: " in said.stdout
