"""Starts a gateway for an embedded card, as nobody's child.

Owns: the detached process's command line, environment, files and the lock that keeps a second one from
being started. Must not know: what the daemon does, sockets' protocols, cards' contents. Names no package:
it works from a vendored copy under any name, and imports nothing of the packages around that copy.
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from .errors import UserError
from .private_files import open_private
from .sockets import prepare_socket_dir, socket_for_card

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["EmbeddedCard", "Starter", "last_log_line", "socket_for_card", "start_detached"]

LOG_NAME: Final = "gateway.log"
LOG_BYTES_MAX: Final = 1 << 20
"""A longer log is moved aside when a gateway is started; one older log is kept."""
STARTER_LOCK_NAME: Final = "starter.lock"
START_S_MIN: Final = 1.0
"""Between two attempts of a `Starter`: a gateway that fails at once is not started in a loop."""
QUIET_ENDS_MAX: Final = 2
"""A gateway ends without a word where another has the card; once may be one that was just ending."""
LAUNCH_S_MAX: Final = 10.0
"""The launcher only forks; longer means that the machine is stuck."""

ENVIRONMENT_NAMES: Final = frozenset({"PATH", "HOME", "TMPDIR", "LANG", "LD_LIBRARY_PATH", "PYTHONHOME"})
"""The last two: some interpreters find their own library and modules through them only."""
ENVIRONMENT_PREFIXES: Final = ("XDG_", "XKV_", "LC_")
REMOTE_PREFIXES: Final = ("MC_", "MOONCAKE_", "GLOG_")
"""Of variables by which a remote's library is set; only where there is a remote."""

# Runs in an interpreter of its own: forks once more and ends, so that the daemon's parent is init. An engine may have
# pinned its process to a core on which it spins: a gateway that kept to that core would starve, so it may use all.
_LAUNCHER: Final = """\
import os, signal, sys
os.umask(0o077)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))
if os.fork():
    os._exit(0)
os.execv(sys.argv[1], sys.argv[1:])
"""

# Makes the package importable by its own last name, wherever it lies, and runs a module of it as __main__. No
# folder of the surroundings comes on the path, so nothing there can shadow a module or be imported.
_BOOT: Final = """\
import importlib.util, os, runpy, sys
sys.path[:] = [entry for entry in sys.path if entry]
folder, name, wanted = sys.argv[1:4]
del sys.argv[1:4]
spec = importlib.util.spec_from_file_location(
    name, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder])
module = importlib.util.module_from_spec(spec)
sys.modules[name] = module
spec.loader.exec_module(module)
runpy.run_module(name + "." + wanted, run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedCard:
    """The card that an embedded gateway serves; None leaves a setting to the gateway."""

    folder: Path
    capacity_bytes: int | None = None
    databases: int | None = None
    grace_ms: int | None = None
    linger_s: float | None = None
    io_threads: int | None = None
    slot_bytes: int | None = None
    remote: str | None = None


def daemon_arguments(card: EmbeddedCard, socket: Path) -> list[str]:
    """The daemon's arguments."""
    arguments = ["--embedded", "--folder", os.path.realpath(card.folder), "--socket", str(socket.absolute())]
    settings = {
        "--capacity-bytes": card.capacity_bytes,
        "--databases": card.databases,
        "--grace-ms": card.grace_ms,
        "--linger-s": card.linger_s,
        "--io-threads": card.io_threads,
        "--slot-bytes": card.slot_bytes,
        "--remote": card.remote,
    }
    for option, value in settings.items():
        if value is not None:
            arguments += [option, str(value)]
    return arguments


def daemon_environment(environ: Mapping[str, str], path: Iterable[str], *, has_remote: bool = False) -> dict[str, str]:
    """What the daemon needs of our environment, and our module path.

    The rest stays behind: the engine's variables change what Python loads (LD_PRELOAD, PYTHONSTARTUP, …),
    and the daemon outlives the engine that happened to start it.
    """
    prefixes = ENVIRONMENT_PREFIXES + (REMOTE_PREFIXES if has_remote else ())
    kept = {name: value for name, value in environ.items() if name in ENVIRONMENT_NAMES or name.startswith(prefixes)}
    folders = dict.fromkeys(str(Path(entry).absolute()) for entry in path)  # "" is the present folder
    kept["PYTHONPATH"] = os.pathsep.join(folder for folder in folders if os.pathsep not in folder)
    return kept


def boot_command(module: str) -> list[str]:
    """What runs a module of this package as a program, in `daemon_environment`; its arguments follow."""
    package = Path(__file__).resolve().parent
    name = (__package__ or package.name).rpartition(".")[2]
    # -S: neither sitecustomize nor .pth files run; what they put on the path is in PYTHONPATH already.
    return [sys.executable, "-S", "-c", _BOOT, str(package), name, module]


def start_detached(card: EmbeddedCard, socket: Path) -> bool:
    """Start a gateway on the card, unless one that was started this way still lives (then False).

    Returns at once; whether it came up is seen at the socket, why it did not in `last_log_line`. Raises
    UserError where the card's folder cannot be made or written, or Python cannot be started.
    """
    if not sys.executable:
        raise UserError("this Python does not know its own program, so no gateway can be started; use xkv.port")
    _make_folder(card.folder)
    lock_fd = _take_starter_lock(card.folder)
    if lock_fd is None:
        return False
    try:
        _launch(card, socket, lock_fd)
    finally:
        os.close(lock_fd)  # the daemon has inherited it, and holds the lock as long as it lives
    return True


_ERROR_LINE: Final = re.compile(r"\S+ \S+ \d+ ERROR \S+: (.+)")  # as the daemon's log has it


class Starter:
    """Starts the gateway of one card, once in a while, and says why the one that it started has ended."""

    def __init__(self, card: EmbeddedCard, socket: Path) -> None:
        self._card = card
        self._socket = socket
        self._started_ns: int | None = None
        self._line_before: str | None = None  # the log's last before our gateway's first; None: there is none of ours
        self._quiet_ends = 0

    def start(self) -> None:
        """Called while nobody answers. Raises UserError where waiting is of no use; may be called again even then."""
        self._look_at_the_last()
        now_ns = time.monotonic_ns()
        if self._started_ns is not None and now_ns - self._started_ns < START_S_MIN * 1e9:
            return
        self._started_ns = now_ns
        prepare_socket_dir(self._socket.parent)
        line = last_log_line(self._card.folder)
        if start_detached(self._card, self._socket):
            self._line_before = line

    def _look_at_the_last(self) -> None:
        if self._line_before is None:
            return
        folder = self._card.folder
        lock_fd = _take_starter_lock(folder)
        if lock_fd is None:
            return  # it lives
        os.close(lock_fd)
        before, self._line_before = self._line_before, None
        line = last_log_line(folder)
        if line != before:
            self._quiet_ends = 0
            said = _ERROR_LINE.fullmatch(line)
            if said is not None:
                raise UserError(f"the gateway of the card in {folder} cannot serve: {said.group(1)}")
            return
        self._quiet_ends += 1
        if self._quiet_ends >= QUIET_ENDS_MAX:
            raise UserError(
                f"the card in {folder} is in use by a gateway that does not listen on {self._socket}: set xkv.port to "
                "that gateway's, stop it, or name another folder with xkv.path"
            )


def _launch(card: EmbeddedCard, socket: Path, lock_fd: int) -> None:
    daemon = [*boot_command("daemon"), *daemon_arguments(card, socket)]
    log_fd = _open_log(card.folder)
    try:
        launcher = subprocess.Popen(
            [sys.executable, "-S", "-c", _LAUNCHER, *daemon],
            stdin=subprocess.DEVNULL,
            stdout=log_fd,
            stderr=log_fd,
            cwd="/",
            env=daemon_environment(os.environ, sys.path, has_remote=card.remote is not None),
            pass_fds=(lock_fd,),
            start_new_session=True,
        )
    except OSError as error:
        raise UserError(f"no gateway can be started with {sys.executable}: {error.strerror}") from error
    finally:
        os.close(log_fd)
    try:
        code = launcher.wait(LAUNCH_S_MAX)
    except subprocess.TimeoutExpired:
        launcher.kill()
        code = launcher.wait()
    if code != 0:
        raise UserError(f"starting a gateway for {card.folder} failed ({last_log_line(card.folder) or f'code {code}'})")


def last_log_line(folder: Path) -> str:
    """The last line that a gateway of this card has written; empty where there is none."""
    try:
        with (folder / LOG_NAME).open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - 4_096))
            lines = log.read().decode("utf-8", "replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"the card's folder {folder} cannot be made ({error.strerror}); name another with xkv.path"
        ) from error


def _take_starter_lock(folder: Path) -> int | None:
    path = folder / STARTER_LOCK_NAME
    try:
        fd = open_private(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise UserError(
            f"the card's folder {folder} cannot be written ({error.strerror}); name another with xkv.path"
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError as error:
        os.close(fd)
        raise UserError(
            f"{path} cannot be locked ({error.strerror}); name a folder on a local file system with xkv.path"
        ) from error
    return fd


def _open_log(folder: Path) -> int:
    path = folder / LOG_NAME
    try:
        fd = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        if os.fstat(fd).st_size > LOG_BYTES_MAX:
            path.replace(path.with_name(LOG_NAME + ".1"))
            os.close(fd)
            fd = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); name another with xkv.path") from error
    return fd
