"""Sockets: who may be where, packets with descriptors, and every way in which a path is not ours."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from xkv_store import sockets
from xkv_store.errors import PeerError, UserError
from xkv_store.sockets import Listener, Peer
from xkv_store.wire_types import MESSAGE_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "s"


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        left.setblocking(False)
        right.setblocking(False)
        yield left, right


# --- where -----------------------------------------------------------------------------------------------


def test_default_folder_is_the_users_own() -> None:
    assert sockets.default_socket_dir({"XDG_RUNTIME_DIR": "/run/user/7"}) == Path("/run/user/7/xkv")
    fallback = sockets.default_socket_dir({})
    assert fallback.name == f"xkv-{os.geteuid()}"
    assert sockets.default_socket_dir({"XDG_RUNTIME_DIR": "relative"}) == fallback


def test_one_card_has_one_socket_however_it_is_spelt(tmp_path: Path) -> None:
    """Two spellings with two sockets would start two gateways on one card."""
    card = tmp_path / "card"
    card.mkdir()
    (tmp_path / "link").symlink_to(card)
    paths = {sockets.socket_for_card(tmp_path, spelt) for spelt in (card, tmp_path / "link", card / ".." / "card")}
    assert len(paths) == 1
    name = paths.pop().name
    assert name.startswith("card-")
    assert len(name) == len("card-0123456789abcdef.sock")


def test_too_long_a_path_is_said_before_anything_is_made(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    with pytest.raises(UserError, match="107"):
        sockets.socket_for_port(deep, 5557)
    with pytest.raises(UserError, match="shorter folder"):
        Listener.open(deep / "1.sock")
    assert not deep.exists()


def test_a_folder_that_is_made_for_others_lets_them_through_and_no_more(tmp_path: Path) -> None:
    """Else nobody that --allow-uid names could reach the socket."""
    sockets.prepare_socket_dir(tmp_path / "shared", shared=True)
    sockets.prepare_socket_dir(tmp_path / "own")
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("shared", "own")]
    assert modes == [sockets.SHARED_FOLDER_MODE, sockets.FOLDER_MODE]
    assert not modes[0] & 0o066


def test_the_folder_must_be_ours_alone(folder: Path) -> None:
    """Whoever can write there can put a listener of their own in our place."""
    sockets.prepare_socket_dir(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    sockets.prepare_socket_dir(folder, shared=True)
    with pytest.raises(UserError, match="chmod 700"):
        sockets.prepare_socket_dir(folder)
    folder.chmod(0o777)
    with pytest.raises(UserError, match="chmod 700"):
        sockets.prepare_socket_dir(folder, shared=True)
    file = folder / "file"
    file.touch()
    with pytest.raises(UserError, match="cannot be made"):
        sockets.prepare_socket_dir(file)
    with pytest.raises(UserError, match="not a folder"):
        sockets.check_socket_dir(file)
    with pytest.raises(UserError, match="no socket folder"):
        sockets.check_socket_dir(folder / "none")


def test_somebody_elses_folder_or_socket(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sockets.prepare_socket_dir(folder)
    path = folder / "1.sock"
    with sockets.new_socket() as left:
        left.bind(str(path))
    us = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: us + 1)
    with pytest.raises(UserError, match=f"belongs to uid {us}, not to uid {us + 1}"):
        sockets.prepare_socket_dir(folder)
    with pytest.raises(UserError, match=f"belongs to uid {us}"):
        sockets._remove_stale(path)


def test_trust() -> None:
    us = os.geteuid()
    assert sockets.is_trusted(Peer(1, us, 0))
    assert sockets.is_trusted(Peer(1, 0, 0))
    assert not sockets.is_trusted(Peer(1, us + 7, 0))
    assert sockets.is_trusted(Peer(1, us + 7, 0), {us + 7})


# --- listening and connecting ----------------------------------------------------------------------------


def test_listen_and_connect(folder: Path) -> None:
    path = sockets.socket_for_port(folder, 1)
    assert sockets.connect(path) is None
    listener = Listener.open(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert listener.accept() is None
    client = sockets.connect(path)
    server = listener.accept()
    assert client is not None
    assert server is not None
    with client, server:
        assert sockets.peer_credentials(client) == Peer(os.getpid(), os.geteuid(), os.getegid())
        assert sockets.send(client, b"hello")
        assert sockets.receive(server) == sockets.Packet(b"hello")
        with pytest.raises(BlockingIOError):
            sockets.receive(server)
    listener.close()
    listener.close()
    assert not path.exists()
    assert sockets.connect(path) is None


def test_a_second_gateway_is_told_who_is_there(folder: Path) -> None:
    path = folder / "1.sock"
    listener = Listener.open(path)
    with pytest.raises(UserError, match=rf"\(pid {os.getpid()}\) already listens"):
        Listener.open(path)
    client = sockets.connect(path)
    assert client is not None, "and the first is not harmed"
    client.close()
    listener.close()
    Listener.open(path).close()


def test_a_killed_gateways_socket_is_taken_over(folder: Path) -> None:
    """After kill -9 the path is still there; a gateway that refused to start would need a person."""
    path = folder / "1.sock"
    code = "import sys, pathlib, time; from xkv_store.sockets import Listener\n"
    code += "l = Listener.open(pathlib.Path(sys.argv[1])); print('up', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.kill()
    assert path.exists()
    assert sockets.connect(path) is None
    Listener.open(path).close()


def test_other_programs_are_left_alone(folder: Path) -> None:
    sockets.prepare_socket_dir(folder)
    path = folder / "1.sock"
    for kind in (socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
        with socket.socket(socket.AF_UNIX, kind) as foreign:
            foreign.bind(str(path))
            foreign.listen()
            with pytest.raises(UserError, match="another program"):
                Listener.open(path)
            assert path.exists()
            if kind == socket.SOCK_STREAM:
                with pytest.raises(UserError, match="no xkv gateway"):
                    sockets.connect(path)
        path.unlink()
    path.write_text("a file")
    with pytest.raises(UserError, match="not a socket"):
        Listener.open(path)
    assert path.read_text() == "a file"


def test_another_gateways_socket_outlives_our_end(folder: Path) -> None:
    """Somebody tidied the folder by hand and started a second gateway: the first one's end may not make it deaf."""
    path = folder / "1.sock"
    first = Listener.open(path)
    path.unlink()
    path.with_name("1.sock.lock").unlink()
    second = Listener.open(path)
    first.close()
    client = sockets.connect(path)
    assert client is not None
    client.close()
    second.close()
    assert not path.exists()


def test_a_full_file_system_is_one_line_and_leaves_nothing(folder: Path) -> None:
    """An empty lock file would stay for good, and a traceback tells nobody to make room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # no file takes a byte
    try:
        with pytest.raises(UserError, match="make room"):
            Listener.open(folder / "1.sock")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(folder.iterdir())
    Listener.open(folder / "1.sock").close()


def test_a_group_that_is_none(folder: Path) -> None:
    with pytest.raises(UserError, match="no group"):
        Listener.open(folder / "1.sock", group="no-such-group-here")
    listener = Listener.open(folder / "1.sock", shared=True)
    assert listener.path.stat().st_mode & 0o777 == 0o666
    listener.close()


# --- packets ---------------------------------------------------------------------------------------------


def test_descriptors_travel_with_their_packet(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    fd = os.memfd_create("test")
    os.write(fd, b"content")
    assert sockets.send(left, b"a", [fd, fd, fd])
    assert sockets.send(left, b"b")
    os.close(fd)
    packet = sockets.receive(right)
    assert packet is not None
    assert packet.data == b"a"
    assert [os.pread(own, 9, 0) for own in packet.fds] == [b"content"] * 3
    assert not any(os.get_inheritable(own) for own in packet.fds), "an engine's children must not keep a ring"
    packet.close()
    assert sockets.receive(right) == sockets.Packet(b"b")


def open_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_oversized_packets_and_too_many_descriptors(pair: tuple[socket.socket, socket.socket]) -> None:
    """Each is the peer's error, and no descriptor stays open: a client could use up the gateway's."""
    left, right = pair
    assert sockets.send(left, bytes(MESSAGE_BYTES_MAX))
    packet = sockets.receive(right)
    assert packet is not None
    assert len(packet.data) == MESSAGE_BYTES_MAX
    before = open_fds()
    assert sockets.send(left, bytes(MESSAGE_BYTES_MAX + 1), [0])
    with pytest.raises(PeerError):
        sockets.receive(right)
    assert sockets.send(left, b"x", [0] * 9)
    with pytest.raises(PeerError):
        sockets.receive(right)
    assert open_fds() == before


def test_the_end_of_a_connection(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    assert sockets.send(left, b"last")
    left.close()
    assert sockets.receive(right) == sockets.Packet(b"last")
    assert sockets.receive(right) is None
    assert sockets.send(right, b"into the void"), "whoever receives is told, not whoever sends"


def test_a_full_socket_does_not_block(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    sent = 0
    while sockets.send(left, bytes([sent % 251]) * 60_000):
        sent += 1
        assert sent < 1_000
    for number in range(sent):
        packet = sockets.receive(right)
        assert packet is not None
        assert packet.data == bytes([number % 251]) * 60_000
    assert sockets.send(left, b"again")
