"""The processes of the demo and the temporary folder that they share.

Owns: an engine's process from its start to its end, the gateway's end, and that afterwards nothing is left.
Must not know: vLLM, what the processes are told, or what their reports mean.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from xkv_store.errors import PeerError, UserError
from xkv_store.sockets import socket_for_card
from xkv_store.tool import Tool

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

STATE: Final = Path(__file__).resolve().parent.parent / ".xkv"
"""noxfile's folder; here for vLLM's notes on model classes, which take it long to make."""
SERVE: Final = Path(__file__).resolve().with_name("serve.py")

EVENT_S_MAX: Final = 300.0  # the longest silence of a process: importing vLLM on a cold, busy machine
EXIT_S_MAX: Final = 60.0  # an engine's end, after its result
GATEWAY_STOP_S_MAX: Final = 30.0
KILL_S_MAX: Final = 10.0  # a killed process that hangs in the kernel longer than this is worth a word
POLL_S: Final = 0.1
LOG_LINES_SHOWN: Final = 30


class DemoError(Exception):
    """The demo failed; the text is one line that says why."""


@dataclass(frozen=True, slots=True)
class Place:
    """The temporary folder and what lies in it."""

    folder: Path

    @property
    def card(self) -> Path:
        """The embedded card."""
        return self.folder / "card"

    @property
    def sockets(self) -> Path:
        """The folder of the gateway's socket."""
        return self.folder / "s"

    @property
    def model(self) -> Path:
        """The model's folder."""
        return self.folder / "model"


class Child:
    """One process of the demo, in a session of its own; it is gone when `end` returns."""

    def __init__(self, mode: str, job: Mapping[str, object], place: Place, target: str) -> None:
        name = f"{mode}-{time.monotonic_ns()}"
        self.log = place.folder / f"{name}.log"
        job_file = place.folder / f"{name}.json"
        job_file.write_text(json.dumps(job))
        self._reader, writer = os.pipe()
        self._pending = b""
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(SERVE), mode, str(job_file), str(writer)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(writer,),
                env=child_environment(os.environ, place, target),
                start_new_session=True,
            )
        os.close(writer)

    def events(self) -> Iterator[dict[str, Any]]:
        """What it reports, up to its result; raises DemoError where it ends or falls silent before."""
        while True:
            line, separator, rest = self._pending.partition(b"\n")
            if separator:
                self._pending = rest
                event = json.loads(line)
                yield event
                if event["event"] == "result":
                    return
                continue
            readable, _, _ = select.select([self._reader], [], [], EVENT_S_MAX)
            if not readable:
                raise DemoError(f"process {self._process.pid} was silent for {EVENT_S_MAX:.0f} s")
            data = os.read(self._reader, 65_536)
            if not data:
                raise DemoError(f"process {self._process.pid} ended before its result; the end of its log is above")
            self._pending += data

    def wait(self) -> None:
        """Until it has ended by itself; raises DemoError where it does not, or ends with an error."""
        try:
            code = self._process.wait(EXIT_S_MAX)
        except subprocess.TimeoutExpired as error:
            raise DemoError(f"process {self._process.pid} did not end in {EXIT_S_MAX:.0f} s") from error
        if code != 0:
            raise DemoError(f"process {self._process.pid} ended with code {code}")

    def end(self) -> None:
        """Kill whatever is left of it."""
        os.close(self._reader)
        with suppress(ProcessLookupError):  # an unreaped child has its number still, a reaped one's group may be gone
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def last_log_lines(self) -> list[str]:
        """The end of its log."""
        return self.log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]


def child_environment(environ: Mapping[str, str], place: Place, target: str) -> dict[str, str]:
    """Give what an engine's process needs: its core within it, a fixed hash seed, no network."""
    root = STATE / "vllm" / target if STATE.is_dir() else place.folder / "vllm"
    return {
        **environ,
        "PYTHONHASHSEED": "0",  # the same in both processes, or no hash of the one would be found by the other
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CACHE_ROOT": str(root),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TMPDIR": str(place.folder),  # what vLLM and torch leave behind goes with the folder
    }


@contextmanager
def child(mode: str, job: Mapping[str, object], place: Place, target: str) -> Iterator[Child]:
    """Give a process that is gone afterwards, and whose log is shown where something fails."""
    process = Child(mode, job, place, target)
    try:
        yield process
    except DemoError:
        for line in process.last_log_lines():
            sys.stderr.write(line + "\n")
        raise
    finally:
        process.end()


def processes_naming(folder: Path) -> list[int]:
    """Processes, other than this one, whose command line names the folder: its gateway, after the engines' end."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            words = (entry / "cmdline").read_bytes()
        except OSError:  # it has just ended
            continue
        if os.fsencode(folder) in words:
            found.append(int(entry.name))
    return found


def card_status(place: Place) -> tuple[int, dict[str, Any]]:
    """The gateway's process id, and what it says of itself."""
    with closing(Tool(socket_for_card(place.sockets, place.card))) as tool:
        return tool.pid, json.loads(tool.status())


def stop_gateway(place: Place) -> None:
    """Ask the embedded gateway to stop until it is gone; kill it where it does not."""
    deadline = time.monotonic() + GATEWAY_STOP_S_MAX
    while processes_naming(place.folder) and time.monotonic() < deadline:
        with (
            suppress(UserError, PeerError, OSError),  # not up yet, or on its way out
            closing(Tool(socket_for_card(place.sockets, place.card))) as tool,
        ):
            tool.stop()
        time.sleep(POLL_S)
    for pid in processes_naming(place.folder):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + KILL_S_MAX
    while left := processes_naming(place.folder):
        if time.monotonic() > deadline:
            raise DemoError(f"still running: {left}")
        time.sleep(POLL_S)


@contextmanager
def temporary_place() -> Iterator[Place]:
    """Give a new folder; afterwards nothing runs that knows of it, and it is gone."""
    place = Place(Path(tempfile.mkdtemp(prefix="xkv-demo-")).resolve())
    try:
        yield place
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # what follows is short, and bounded
        try:
            stop_gateway(place)
        finally:
            shutil.rmtree(place.folder)
