"""A service's memory and environment, looked at by another process of its user."""

from __future__ import annotations

import subprocess
import sys

import pytest

SERVICE = "from common.process.hidden_memory import hide_memory\n{}\nprint(flush=True)\ninput()"
UNPRIVILEGED = """
import ctypes, os, sys
for capability in (19, 21, 38):  # CAP_SYS_PTRACE, CAP_SYS_ADMIN and CAP_PERFMON, which root has
    ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
os.execv(sys.argv[1], sys.argv[1:])
"""
LOOK = "import sys; open(f'/proc/{sys.argv[1]}/environ').read(); print('read')"


@pytest.mark.parametrize("hidden", [True, False])
def test_a_process_that_hides_is_not_read_by_others_of_its_user(hidden: bool) -> None:
    code = SERVICE.format("hide_memory()" if hidden else "")
    unprivileged = [sys.executable, "-c", UNPRIVILEGED, sys.executable, "-c"]
    with subprocess.Popen([*unprivileged, code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as service:
        assert service.stdout is not None
        service.stdout.readline()
        looked = subprocess.run([*unprivileged, LOOK, str(service.pid)], capture_output=True, text=True, check=False)
        service.communicate(b"\n")
    assert ("PermissionError" in looked.stderr, looked.stdout) == ((True, "") if hidden else (False, "read\n"))
