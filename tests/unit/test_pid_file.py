from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from blobstore.errors import SetupError
from blobstore.pid_file import pid_file


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    return tmp_path / "b.sock"


def test_it_names_this_process_and_is_gone_at_the_end(socket: Path) -> None:
    with pid_file(socket) as path:
        assert path == socket.parent / "b.sock.pid"
        assert path.read_text() == f"{os.getpid()}\n"
    assert list(socket.parent.iterdir()) == []


def test_one_left_by_a_killed_daemon_is_taken_over(socket: Path) -> None:
    socket.with_name("b.sock.pid").write_text("999999 and more\n")
    with pid_file(socket) as path:
        assert path.read_text() == f"{os.getpid()}\n"


def test_a_second_owner_is_refused_with_the_pid_and_leaves_the_first_alone(socket: Path) -> None:
    with pid_file(socket) as path:
        with pytest.raises(SetupError, match=f"pid {os.getpid()}:"), pid_file(socket):
            pass
        assert path.read_text() == f"{os.getpid()}\n"


def test_a_directory_that_does_not_exist_is_named_with_the_remedy(socket: Path) -> None:
    with pytest.raises(SetupError, match=r"No such file.*--socket"), pid_file(socket / "b.sock"):
        pass


def test_a_link_is_not_followed(socket: Path) -> None:
    target = socket.with_name("precious")
    target.write_text("kept")
    socket.with_name("b.sock.pid").symlink_to(target)
    with pytest.raises(SetupError), pid_file(socket):
        pass
    assert target.read_text() == "kept"


def test_a_failure_inside_gives_the_path_back(socket: Path) -> None:
    with pytest.raises(RuntimeError), pid_file(socket):
        raise RuntimeError
    with pid_file(socket):
        pass


def test_owners_that_come_and_go_are_never_two_at_a_time(socket: Path) -> None:
    inside, most = 0, 0
    guard = threading.Lock()

    def take_turns() -> None:
        nonlocal inside, most
        taken = 0
        while taken < 50:
            try:
                with pid_file(socket):
                    with guard:
                        inside += 1
                        most = max(most, inside)
                    taken += 1
                    with guard:
                        inside -= 1
            except SetupError:
                continue

    threads = [threading.Thread(target=take_turns) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
