"""The embedded daemon: started by several at once, one serves; it is nobody's child; it ends after its linger."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from xkv_store import sockets, wire
from xkv_store.daemon import parse
from xkv_store.embedded import LOG_NAME
from xkv_store.geometry import Geometry
from xkv_store.key import ObjectKey
from xkv_store.testing.peer import Peer
from xkv_store.wire import LoadStatus, StoreStatus

if TYPE_CHECKING:
    from collections.abc import Iterator

GEOMETRY = Geometry(65_536)
KEY = ObjectKey(b"d" * 16, 0, b"h" * 32, 0).encode()
WAIT_S_MAX = 30.0


class Place:
    """A card's folder and its socket, and the daemons that were started on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "card"
        self.socket = folder / "sockets" / "card.sock"

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
        command = [sys.executable, "-m", "xkv_store.daemon", "--embedded"]
        command += ["--folder", str(self.folder), "--socket", str(self.socket)]
        command += ["--capacity-bytes", str(8 << 20), "--slot-bytes", "65536", *options]
        return subprocess.Popen(command, env=environment)

    def peer(self) -> Peer:
        deadline = time.monotonic() + WAIT_S_MAX
        while time.monotonic() < deadline:
            with suppress(ConnectionRefusedError):
                return Peer(self.socket, geometry=GEOMETRY)
            time.sleep(0.02)
        raise TimeoutError(f"no daemon at {self.socket}: {self.log()}")

    def log(self) -> str:
        path = self.folder / LOG_NAME
        return path.read_text() if path.exists() else "no log"

    def daemon_pid(self) -> int:
        peer = self.peer()
        try:
            return sockets.peer_credentials(peer.socket).pid
        finally:
            peer.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    with suppress(ConnectionRefusedError, TimeoutError):
        peer = Peer(made.socket, geometry=GEOMETRY)
        peer.hello(role=wire.Role.TOOL)
        peer.receive(wire.Welcome)
        peer.send(wire.Stop(1))
        peer.receive(wire.Done)
        assert peer.next() is None
        peer.close()


def test_of_several_one_serves_and_the_others_end_quietly(place: Place) -> None:
    started = [place.start("--linger-s", "60") for _ in range(3)]
    serving = place.daemon_pid()
    codes = {one.pid: one.wait(WAIT_S_MAX) for one in started if one.pid != serving}
    assert sorted(codes.values()) == [0, 0]
    assert "Traceback" not in place.log()
    assert "ERROR" not in place.log()
    winner = next(one for one in started if one.pid == serving)
    assert winner.poll() is None
    winner.terminate()
    assert winner.wait(WAIT_S_MAX) == 0


def test_detached_it_is_nobodys_child(place: Place) -> None:
    launcher = place.start("--detach", "--linger-s", "60")
    assert launcher.wait(WAIT_S_MAX) == 0
    pid = place.daemon_pid()
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    parent, session = int(fields[1]), int(fields[3])
    assert parent != os.getpid()
    assert session not in (os.getsid(0), pid), "a session of its own, which it does not lead"


def test_it_ends_after_its_last_session_and_the_next_one_finds_the_objects(place: Place) -> None:
    first = place.start("--linger-s", "0.5")
    peer = place.peer()
    peer.attach()
    assert peer.put(b"content", KEY) is StoreStatus.CONFIRMED
    time.sleep(1.0)
    assert first.poll() is None, "it ended under an attached session"
    peer.close()
    assert first.wait(WAIT_S_MAX) == 0
    second = place.start("--linger-s", "0.5")
    peer = place.peer()
    peer.attach()
    assert peer.get(7, KEY) == (LoadStatus.OK, b"content")
    peer.close()
    assert second.wait(WAIT_S_MAX) == 0


def test_why_it_could_not_serve_stands_in_the_log(place: Place) -> None:
    done = place.start("--slot-bytes", "100")
    assert done.wait(WAIT_S_MAX) == 1
    assert "slot bytes must be a multiple" in place.log().splitlines()[-1]


def test_wrong_arguments_are_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--folder", "x"])
    assert ended.value.code == 2
    assert "--socket" in capsys.readouterr().err
