"""What the installed client is made of."""

from __future__ import annotations

import subprocess
import sys
import textwrap

from google.protobuf.descriptor import FileDescriptor

from twinlens import v1
from twinlens.v1 import encoder_pb2, llm_pb2, media_pb2

FILES: list[FileDescriptor] = [module.DESCRIPTOR for module in (media_pb2, encoder_pb2, llm_pb2)]


def names(file: FileDescriptor) -> set[str]:
    enums = file.enum_types_by_name
    values = {value.name for enum in enums.values() for value in enum.values}
    services = {f"{name}{part}" for name in file.services_by_name for part in ("Stub", "Servicer")}
    adders = {f"add_{name}Servicer_to_server" for name in file.services_by_name}
    return {*file.message_types_by_name, *enums, *values, *services, *adders}


def test_v1_has_the_whole_contract_and_nothing_else() -> None:
    contract = set().union(*map(names, FILES))
    assert len(contract) > 80
    assert set(v1.__all__) == contract
    assert all(hasattr(v1, name) for name in contract)


def test_the_client_needs_grpcio_and_protobuf_alone() -> None:
    """Imports everything in a process that refuses any other package outside the standard library."""
    program = textwrap.dedent("""
        import importlib, pkgutil, sys

        class Guard:
            allowed = {"twinlens", "grpc", "google", "typing_extensions", *sys.stdlib_module_names}

            def find_spec(self, name, path=None, target=None):
                top = name.partition(".")[0]
                if top not in self.allowed or name.startswith(("google.rpc", "google.api")):
                    raise ModuleNotFoundError(f"the client may not import {name}", name=name)

        sys.meta_path.insert(0, Guard())
        import twinlens
        found = [module.name for module in pkgutil.walk_packages(twinlens.__path__, "twinlens.")]
        found.remove("twinlens.__main__")
        for name in found:
            importlib.import_module(name)
        print(len(found))
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 15
