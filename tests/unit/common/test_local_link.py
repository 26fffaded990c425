"""The local link: who is handed memory, who is not, and what is left behind."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from common.shm import local_link
from common.shm.arena import ReaderView, SharedBuffer
from common.shm.local_link import GRANT_BYTES, SECRET_BYTES, SharedArena

SECRET = b"s" * SECRET_BYTES
GRANT = b"g" * GRANT_BYTES


@pytest.fixture
def buffer() -> Iterator[SharedBuffer]:
    buffer = SharedBuffer.create("test", 4096)
    buffer.view[:4] = b"rows"
    yield buffer
    buffer.close()


def serve(server: socket.socket, buffer: SharedBuffer) -> threading.Thread:
    """Hands the buffer to the first caller."""

    def once() -> None:
        server.setblocking(True)
        link, _ = server.accept()
        with closing(link):
            assert link.recv(SECRET_BYTES) == SECRET
            descriptors = [buffer.open_reader(), buffer.open_reader()]
            local_link.hand_over(link, SharedArena(GRANT, *descriptors))
            for descriptor in descriptors:
                os.close(descriptor)

    thread = threading.Thread(target=once)
    thread.start()
    return thread


@pytest.mark.parametrize("kind", ["abstract", "in a folder"])
def test_what_is_handed_over_can_be_read_and_not_written(tmp_path: Path, buffer: SharedBuffer, kind: str) -> None:
    folder = "" if kind == "abstract" else str(tmp_path)
    server, name = local_link.listen(folder)
    assert name.startswith("@") == (kind == "abstract")
    with closing(server):
        thread = serve(server, buffer)
        link, handover = local_link.connect(name, folder, SECRET)
        thread.join()
        assert handover.grant == GRANT
        view = ReaderView(handover.arena)
        assert bytes(view.view[:4]) == b"rows"
        assert view.view.readonly
        buffer.view[:4] = b"more"
        assert bytes(view.view[:4]) == b"more"
        view.close()
        os.close(handover.board)
        assert link.recv(1) == b"", "the end of the connection is how each side hears that the other is gone"
        link.close()
    local_link.unlink(folder, name)
    assert list(tmp_path.iterdir()) == []


def test_a_descriptor_that_was_handed_over_cannot_be_mapped_for_writing(buffer: SharedBuffer) -> None:
    descriptor = buffer.open_reader()
    with pytest.raises(PermissionError):
        SharedBuffer.attach(descriptor, 4096)
    os.close(descriptor)


def test_memory_whose_size_can_change_is_not_mapped() -> None:
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, 4096)
    with pytest.raises(ValueError, match="size"):
        ReaderView(descriptor)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)


@pytest.mark.parametrize("name", ["@other", "../twinlens-x", "twinlens-../x", "twinlens-a/b", "@twinlens-\0", ""])
def test_a_name_from_the_network_chooses_nothing_but_our_own_sockets(tmp_path: Path, name: str) -> None:
    with pytest.raises(OSError, match="no name"):
        local_link.connect(name, str(tmp_path), SECRET)


def test_a_name_without_a_listener_and_a_file_without_a_folder_are_errors(tmp_path: Path) -> None:
    for name, folder in (("@twinlens-none", ""), ("twinlens-none", str(tmp_path)), ("twinlens-none", "")):
        with pytest.raises(OSError, match=r"refused|No such file|no folder"):
            local_link.connect(name, folder, SECRET)


def test_a_folder_that_takes_no_socket_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=rf"no local socket can be made in {tmp_path}/none \(--local-dir\): No such file"):
        local_link.listen(str(tmp_path / "none"))


def test_one_who_hangs_up_without_handing_over_is_an_error() -> None:
    server, name = local_link.listen("")
    with closing(server):
        server.setblocking(True)

        def hang_up() -> None:
            server.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(OSError, match=r"nothing|reset|pipe"):
            local_link.connect(name, "", SECRET)
        thread.join()


def test_sockets_of_services_that_were_killed_are_swept_and_living_ones_are_not(tmp_path: Path) -> None:
    alive, living = local_link.listen(str(tmp_path))
    dead, stale = local_link.listen(str(tmp_path))
    dead.close()
    (tmp_path / "other").touch()
    third, name = local_link.listen(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {living, name, "other"}
    assert stale not in (living, name)
    alive.close()
    third.close()


def test_services_that_start_together_leave_each_other_s_sockets_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listen = socket.socket.listen

    def late(server: socket.socket, backlog: int) -> None:
        monkeypatch.undo()
        other, its_name = local_link.listen(str(tmp_path))
        other.close()
        local_link.unlink(str(tmp_path), its_name)
        listen(server, backlog)

    monkeypatch.setattr(socket.socket, "listen", late)
    server, name = local_link.listen(str(tmp_path))
    with closing(server), closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as caller:
        caller.connect(str(tmp_path / name))
    local_link.unlink(str(tmp_path), name)
    assert list(tmp_path.iterdir()) == []
