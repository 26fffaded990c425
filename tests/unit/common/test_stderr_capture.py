"""What others write to standard error becomes lines of our log; last words and children stay as they were."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

PROGRAM = """
    import asyncio, logging, os, sys, warnings
    from common.telemetry import stderr_capture, log
    from common.process.children import Child

    log.configure("info", service="encoder")
    stderr_capture.start()
    os.write(2, b"E0000 00:00:00.1 1 core.cc:1] a line of gRPC\\nW0000 00:00:00.1 1 core.cc:2] another, ")
    log.get("server").info("ready")
    os.write(2, b"in pieces\\n")
    logging.getLogger("asyncio").error("a task was lost")
    warnings.warn("old ways")
    child = [sys.executable, "-c", "import os; os.write(2, b'a child\\\\n')"]
    import subprocess
    subprocess.run(child, stderr=stderr_capture.descriptor(), check=True)
    sys.exit("the last word")
"""


def test_each_line_is_an_object_but_for_the_last_word() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)], capture_output=True, text=True, check=False, timeout=180
    )
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    plain = [line for line in lines if not line.startswith("{")]
    assert sorted(plain) == ["a child", "the last word"]
    told = [json.loads(line) for line in lines if line.startswith("{")]
    native = [(each["level"], each["event"].partition("] ")[2]) for each in told if each["component"] == "native"]
    assert native == [("error", "a line of gRPC"), ("warning", "another, in pieces")]
    assert {each["service"] for each in told} == {"encoder"}
    others = {each["component"]: each["event"] for each in told if each["component"] != "native"}
    assert others["server"] == "ready"
    assert others["asyncio"] == "a task was lost"
    assert "old ways" in others["py.warnings"]


def test_a_line_is_one_write() -> None:
    """However long it is, and whichever of several processes writes between them."""
    program = """
        import os, sys
        from common.telemetry import log
        written = []
        class Raw:
            def write(self, text): written.append(text); return len(text)
            def flush(self): pass
            def isatty(self): return False
        sys.stderr = Raw()
        log.configure("info", service="encoder")
        log.get("server").info("x" * 100_000)
        assert len(written) == 1 and written[0].endswith("}" + chr(10)), len(written)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=180)
