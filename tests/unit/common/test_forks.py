"""A service for whose children there is no room, for a moment."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.launch import ROOT

_PROGRAM = """
import asyncio, contextlib, os, resource, sys
from importlib import import_module

with contextlib.suppress(SystemExit):
    import_module(sys.argv[1] + ".__main__").main()  # which says what its options are
import grpc
from common.process.children import ChildProcess

LIMIT = resource.RLIMIT_NPROC

async def same(request, context):
    return request

async def main():
    server = grpc.aio.server()
    methods = {"same": grpc.unary_unary_rpc_method_handler(same)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert await channel.unary_unary("/s/same")(b"before") == b"before"
    if os.geteuid() == 0:
        os.setresuid(65534, 65534, 65534)  # there is room for all processes of root
    now, most = resource.getrlimit(LIMIT)
    resource.setrlimit(LIMIT, (1, most))
    with contextlib.suppress(BlockingIOError):
        ChildProcess(["/bin/true"], {}, ())
        sys.exit("there was room for a process")
    resource.setrlimit(LIMIT, (now, most))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        os.write(1, await channel.unary_unary("/s/same")(b"it answers"))
    os._exit(0)

asyncio.run(main())
"""


@pytest.mark.parametrize("service", ["encoder_service", "llm_service"])
def test_a_service_answers_though_there_was_no_room_for_a_process(service: str) -> None:
    program = [sys.executable, "-c", _PROGRAM, service, "--help"]
    ran = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=180, check=True)
    assert ran.stdout.endswith("it answers")
