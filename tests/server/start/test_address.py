"""Sockets that a server leaves, and where none can be."""

import os
import re
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from supervised import begun, supervised

from attnres_serve.errors import SettingError
from attnres_serve.server.start import address


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A folder with a path that is short enough for sockets."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.parametrize("is_relative", [False, True])
def test_a_socket_that_a_server_left_is_removed(sockets, monkeypatch, is_relative):
    monkeypatch.chdir(sockets)
    path = "s" if is_relative else str(sockets / "s")
    address.clear_socket(path)  # there is none yet
    for _ in range(2):
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            server.listen()
        assert os.path.exists(path)  # as after a stop, and after kill -9
        address.clear_socket(path)
        assert not os.path.exists(path)


HAS_SOCKET = """
import signal, socket
from attnres_serve.start import events
path = sys.argv[2]
events.tell("checked", title="", log=False, headless=False, socket=path)
server = socket.socket(socket.AF_UNIX)
server.bind(path)
"""

IS_READY = """
server.listen()
events.tell("ready", url="http://localhost", socket=path, ask="", problem=None)
"""


@pytest.mark.parametrize(
    ("goes_on", "number", "status"),
    [
        (
            "signal.signal(15, lambda *_: sys.exit(0))" + IS_READY + "time.sleep(60)",
            signal.SIGTERM,
            0,
        ),
        ("signal.signal(2, signal.SIG_DFL)" + IS_READY + "time.sleep(60)", signal.SIGINT, 130),
        (IS_READY + "os.kill(os.getpid(), 9)", None, 128 + 9),
        ("events.tell('warning', text='begun'); time.sleep(60)", signal.SIGTERM, 130),
        ("sys.exit('no such engine')", None, 1),
    ],
    ids=["stopped", "cut off", "killed", "interrupted in its start", "not started"],
)
def test_no_server_that_ends_leaves_its_socket(sockets, goes_on, number, status):
    words = [*supervised(HAS_SOCKET + goes_on), "s"]
    with begun(words, stderr=subprocess.STDOUT, cwd=sockets) as process:
        while number and not re.search(b"metrics|begun", process.stdout.readline()):
            assert process.poll() is None
        if number:
            process.send_signal(number)
        assert process.wait(60) == status
        assert not (sockets / "s").exists()


@pytest.mark.parametrize("listens", [True, False])
@pytest.mark.parametrize("is_relative", [False, True])
def test_a_socket_in_use_stays(sockets, monkeypatch, listens, is_relative):
    """Also that of a server that starts, which holds it and does not listen yet."""
    monkeypatch.chdir(sockets)
    path = "s" if is_relative else str(sockets / "s")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        if listens:
            server.listen()
        with pytest.raises(SettingError, match=r"s is in use by another server; stop that one, or"):
            address.clear_socket(path)
        assert os.path.exists(path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("file", "is a file and no socket; choose another path with --uds."),
        ("folder", "is a folder and no socket; choose another path with --uds."),
        ("link", "is a file and no socket"),
        (
            "nowhere/s",
            r"^no socket can be made at .*nowhere/s \(No such file or directory\); choose",
        ),
        ("file/s", r"\(Not a directory\); choose another path"),
        ("ä" * 60, r"\(AF_UNIX path too long\); choose another path with --uds."),
    ],
)
def test_a_path_where_no_socket_can_be(sockets, name, said):
    (sockets / "file").write_text("kept")
    (sockets / "folder").mkdir()
    (sockets / "link").symlink_to("file")
    with pytest.raises(SettingError, match=said):
        address.clear_socket(str(sockets / name))
    assert (sockets / "file").read_text() == "kept"
    assert {path.name for path in sockets.iterdir()} == {"file", "folder", "link"}
