"""Unix sockets between gateways and clients: where they lie, who may be at the other end, how packets go.

Owns: the socket folder and its checks, the listener with its lock, connecting, packets with descriptors,
peer credentials. Must not know: messages or sessions. What the user can mend raises `UserError`; what a
peer does wrong raises `PeerError`.
"""

from __future__ import annotations

import array
import errno
import fcntl
import grp
import os
import socket
import stat
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import xxhash

from .errors import PeerError, UserError
from .wire import DESCRIPTORS_MAX
from .wire_types import MESSAGE_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

SOCKET_PATH_BYTES_MAX: Final = 107
"""sockaddr_un.sun_path holds 108 bytes with the closing zero."""
BACKLOG: Final = 128
"""Connections that wait to be accepted; several engines of many ranks may start at once."""
SOCKET_BUFFER_BYTES: Final = 1 << 20
"""Asked for, both ways (the kernel may grant less): some 16 of the largest messages."""
FOLDER_MODE: Final = 0o700
SHARED_FOLDER_MODE: Final = 0o711  # others reach the socket in it, and see or write nothing
SOCKET_MODE: Final = 0o600
GROUP_SOCKET_MODE: Final = 0o660
SHARED_SOCKET_MODE: Final = 0o666

_CREDENTIALS: Final = struct.Struct("3i")


# --- where ------------------------------------------------------------------------------------------------


def default_socket_dir(environ: Mapping[str, str] | None = None) -> Path:
    """The folder of this user's sockets; nothing is made or checked here."""
    runtime = (os.environ if environ is None else environ).get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/"):
        return Path(runtime, "xkv")
    return Path(tempfile.gettempdir(), f"xkv-{os.geteuid()}")


def prepare_socket_dir(folder: Path, *, shared: bool = False) -> None:
    """Make the folder (0700) where it is missing, and check it; raises UserError.

    `shared`: the user opens the gateway to others, who must be able to reach the socket through it.
    """
    try:
        folder.mkdir(mode=SHARED_FOLDER_MODE if shared else FOLDER_MODE, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"the socket folder {folder} cannot be made ({error.strerror}); name another with xkv.socket_dir "
            "or --socket-dir"
        ) from error
    check_socket_dir(folder, shared=shared)


def check_socket_dir(folder: Path, *, shared: bool = False) -> None:
    """Raises UserError unless the folder is ours alone (or, `shared`, at least nobody else's to write)."""
    try:
        status = folder.lstat()
    except FileNotFoundError as error:
        raise UserError(f"there is no socket folder {folder}: no gateway has run there") from error
    except OSError as error:
        raise UserError(f"the socket folder {folder} cannot be read: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise UserError(f"{folder} is not a folder; move it away, or name another with xkv.socket_dir")
    if status.st_uid != os.geteuid():
        raise UserError(
            f"the socket folder {folder} belongs to uid {status.st_uid}, not to uid {os.geteuid()}; name a "
            "folder of your own with xkv.socket_dir (--socket-dir for a gateway)"
        )
    forbidden = 0o022 if shared else 0o077
    if status.st_mode & forbidden:
        mode = stat.S_IMODE(status.st_mode)
        raise UserError(f"the socket folder {folder} is open to others (mode {mode:04o}); type: chmod 700 {folder}")


def socket_for_port(socket_dir: Path, port: int) -> Path:
    """The socket of a gateway that runs on a port; raises UserError where the path is too long."""
    return _checked_length(socket_dir / f"{port}.sock")


def socket_for_card(socket_dir: Path, folder: Path) -> Path:
    """The socket of the gateway that serves the card in `folder`, however the folder is spelt."""
    digest = xxhash.xxh3_64_hexdigest(os.fsencode(os.path.realpath(folder)))  # of a loop of links, too
    return _checked_length(socket_dir / f"card-{digest}.sock")


def _checked_length(path: Path) -> Path:
    length = len(os.fsencode(path))
    if length > SOCKET_PATH_BYTES_MAX:
        raise UserError(
            f"the socket's path {path} has {length} bytes, a Unix socket takes {SOCKET_PATH_BYTES_MAX}; name "
            "a shorter folder with xkv.socket_dir (--socket-dir for a gateway)"
        )
    return path


# --- who --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end, as it was when it connected or listened."""

    pid: int
    uid: int
    gid: int


def peer_credentials(connection: socket.socket) -> Peer:
    """Who is at the other end, by the kernel's word."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return Peer(*_CREDENTIALS.unpack(raw))


def is_trusted(peer: Peer, allow_uids: Collection[int] = ()) -> bool:
    """Our own user, root (who could do anything anyway), or one that was named."""
    return peer.uid in (os.geteuid(), 0) or peer.uid in allow_uids


# --- listening and connecting -----------------------------------------------------------------------------


def new_socket() -> socket.socket:
    """An unconnected, non-blocking socket of the kind that both ends use."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setblocking(False)
    _enlarge_buffers(connection)
    return connection


def _enlarge_buffers(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)


class Listener:
    """A listening socket at a path, and the lock file beside it that lets one process alone be there.

    The kernel drops the lock with the process, so a leftover socket is known to be nobody's.
    """

    def __init__(self, path: Path, listening: socket.socket, lock_fd: int) -> None:
        self.path = path
        self.socket = listening
        self._lock_fd = lock_fd
        self._identity = _identity(path)

    @classmethod
    def open(cls, path: Path, *, group: str | None = None, shared: bool = False) -> Listener:
        """Listen at `path`; raises UserError where somebody else does or the folder is not ours.

        `group`: members of that group may connect; `shared`: any user may (the caller checks credentials).
        """
        _checked_length(path)
        gid = None if group is None else _group_id(group)  # before anything is made
        prepare_socket_dir(path.parent, shared=shared or group is not None)
        lock_fd = _take_lock(path)
        try:
            _remove_stale(path)
            listening = new_socket()
            try:
                _bind(listening, path, gid=gid, shared=shared)
            except BaseException:
                listening.close()
                raise
        except BaseException:
            os.close(lock_fd)
            raise
        return cls(path, listening, lock_fd)

    def accept(self) -> socket.socket | None:
        """The next connection, non-blocking; None where there is none (any more)."""
        try:
            connection, _address = self.socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None
        connection.setblocking(False)
        _enlarge_buffers(connection)
        return connection

    def close(self) -> None:
        """Stop listening, remove the socket, drop the lock (in that order: nobody else was there before).

        Where somebody has removed socket and lock by hand, the path may be another gateway's by now: it stays.
        """
        if self._lock_fd < 0:
            return
        is_ours = _identity(self.path) == self._identity  # asked while our socket keeps its inode's number taken
        self.socket.close()
        if is_ours:
            self.path.unlink(missing_ok=True)
        os.close(self._lock_fd)
        self._lock_fd = -1


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _take_lock(path: Path) -> int:
    lock = path.with_name(path.name + ".lock")
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise UserError(f"{lock} cannot be opened: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(fd, 20, 0).decode("ascii", "replace").strip()
        os.close(fd)
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise UserError(f"{lock} cannot be locked: {error.strerror}") from error
        named = f" (pid {holder})" if holder.isdigit() else ""
        raise UserError(
            f"a gateway{named} already listens on {path}; use it, or stop it with `xkv gateway stop`, or "
            "take another port"
        ) from error
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
    except OSError as error:
        lock.unlink(missing_ok=True)  # before the lock goes: until then nobody else has it
        os.close(fd)
        raise UserError(
            f"{lock} cannot be written ({error.strerror}); make room, or name another folder with xkv.socket_dir "
            "or --socket-dir"
        ) from error
    return fd


def _remove_stale(path: Path) -> None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise UserError(f"{path} is there and not a socket; move it away")
    if status.st_uid != os.geteuid():
        raise UserError(f"{path} belongs to uid {status.st_uid}; have them remove it, or take another port")
    with new_socket() as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            if error.errno == errno.ENOENT:
                return
            raise UserError(
                f"{path} is another program's socket ({error.strerror}); end it, or take another port"
            ) from error
    raise UserError(f"another program listens on {path}; end it, or take another port")


def _group_id(group: str) -> int:
    try:
        return grp.getgrnam(group).gr_gid
    except (KeyError, ValueError) as error:  # not there, or a NUL in its name
        raise UserError(f"there is no group {group!r} on this machine; see --socket-group") from error


def _bind(listening: socket.socket, path: Path, *, gid: int | None, shared: bool) -> None:
    mode = SHARED_SOCKET_MODE if shared else GROUP_SOCKET_MODE if gid is not None else SOCKET_MODE
    try:
        listening.bind(str(path))
        if gid is not None:
            os.chown(path, -1, gid)
        path.chmod(mode)  # until then nobody can connect: it does not listen yet
        listening.listen(BACKLOG)
    except OSError as error:
        raise UserError(f"cannot listen on {path}: {error.strerror}") from error


def connect(path: Path) -> socket.socket | None:
    """A non-blocking connection to whoever listens at `path`; None where nobody does (yet).

    Raises UserError where the folder or the socket is somebody else's, or no socket of ours.
    """
    _checked_length(path)
    connection = new_socket()
    try:
        connection.connect(str(path))
    except OSError as error:
        connection.close()
        if error.errno in (errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN, errno.ECONNRESET):
            return None
        if error.errno == errno.EACCES:
            raise UserError(
                f"{path} is not open to uid {os.geteuid()}; its gateway must name it with --allow-uid or --socket-group"
            ) from error
        if error.errno == errno.EPROTOTYPE:
            raise UserError(f"what listens on {path} is no xkv gateway; take another port") from error
        raise UserError(f"cannot connect to {path}: {error.strerror}") from error
    return connection


# --- packets ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Packet:
    """One received message and the descriptors beside it, which are the receiver's to close."""

    data: bytes
    fds: tuple[int, ...] = ()

    def close(self) -> None:
        """Close all descriptors."""
        for fd in self.fds:
            os.close(fd)


_CONTROL_BYTES: Final = socket.CMSG_SPACE(DESCRIPTORS_MAX * array.array("i").itemsize)
_RECEIVE_FLAGS: Final = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
_SEND_FLAGS: Final = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT
_GONE: Final = (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN, errno.ECONNABORTED)


def send(connection: socket.socket, data: bytes, fds: Sequence[int] = ()) -> bool:
    """Send one packet; False where the socket is full just now.

    A peer that is gone is no error here: the receiving side is told by `receive`, so this says True.
    """
    try:
        if fds:
            socket.send_fds(connection, [data], list(fds), _SEND_FLAGS)
        else:
            connection.send(data, _SEND_FLAGS)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno == errno.ENOBUFS:
            return False
        if error.errno not in _GONE:
            raise
    return True


def receive(connection: socket.socket) -> Packet | None:
    """The next packet; None at the connection's end. Raises BlockingIOError where there is none now.

    Raises PeerError for an oversized packet or too many descriptors; all that came with it is closed.
    """
    try:
        data, ancillary, flags, _address = connection.recvmsg(MESSAGE_BYTES_MAX + 1, _CONTROL_BYTES, _RECEIVE_FLAGS)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise
    packet = Packet(data, _descriptors(ancillary))
    if len(data) > MESSAGE_BYTES_MAX or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        packet.close()
        raise PeerError("a packet that is too long or carries too many descriptors")
    if not data:
        packet.close()
        return None
    return packet


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> tuple[int, ...]:
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return tuple(fds)
