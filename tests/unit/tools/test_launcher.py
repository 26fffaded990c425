from __future__ import annotations

import signal
import threading

import pytest

from tools.launcher import NotStartedError, Service

FAKE = "tests.unit.tools.fake_service"


def test_a_service_is_ready_when_it_says_so_and_ends_when_it_is_asked_to() -> None:
    with Service("fake", FAKE, []) as service:
        assert service.wait_ready(120) == "127.0.0.1:4321"
        assert not service.ended
        assert service.stop() == 0
        assert service.ended


def test_a_service_that_ends_first_is_not_started() -> None:
    with Service("fake", FAKE, ["fails"]) as service, pytest.raises(NotStartedError, match="exit code 3"):
        service.wait_ready(120)


def test_a_service_that_says_nothing_is_not_started() -> None:
    with Service("fake", FAKE, ["silent"]) as service, pytest.raises(NotStartedError, match=r"after 0\.2 s"):
        service.wait_ready(0.2)


def test_one_that_hears_nothing_is_killed() -> None:
    with Service("fake", FAKE, ["deaf"]) as service:
        service.wait_ready(120)
        assert service.stop(timeout=0.2) == -signal.SIGKILL


def test_changes_are_told() -> None:
    changes = threading.Semaphore(0)
    with Service("fake", FAKE, ["short"], on_change=changes.release) as service:
        assert changes.acquire(timeout=120)
        assert changes.acquire(timeout=120)
        assert service.ended
        assert service.stop() == 7


def test_standard_error_may_go_to_a_file(tmp_path) -> None:
    path = tmp_path / "log"
    with (
        path.open("w") as errors,
        Service("fake", "tests.no_such_module", [], errors=errors) as service,
        pytest.raises(NotStartedError),
    ):
        service.wait_ready(120)
    assert "no_such_module" in path.read_text()
