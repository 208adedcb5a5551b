"""A real gateway in a process of its own, started as a user starts it, with its time, CPU and memory.

Owns: the process, from start to its end by its pid, and reading /proc about it.
Must not know: what is measured with it.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from xkv_store.client import Attachment, Client, Role
from xkv_store.geometry import FRAGMENT_BYTES
from xkv_store.key import ObjectKey
from xkv_store.tool import Tool

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MIB: Final = 1 << 20
READY_S_MAX: Final = 120.0  # far beyond any bar: a start that takes so long has failed
END_S_MAX: Final = 30.0
MEMORY_POLL_S: Final = 0.2
MEMORY_POLLS_MAX: Final = 600
LINGER_S: Final = 60.0  # a gateway whose benchmark was killed ends by itself
ENGINE: Final = "bench"
HEARTBEAT_MS_MAX: Final = 3_000
# Mapped files that are shared, or the kernel's to give up: everything else is the gateway's own.
SHARED: Final = {"ring": "memfd:xkv-ring", "table": "memfd:xkv-table", "index": "data.mdb"}


@dataclass(frozen=True, slots=True)
class Resident:
    """Resident MiB: by shared mapping, and all the rest."""

    shared: dict[str, float]
    own: float


class BenchGateway:
    """`xkv gateway run`. `start_s`: from the start of the process to its ready line."""

    def __init__(self, folder: Path, words: Sequence[str], *, has_card: bool = True) -> None:
        """`folder`: of its log, its socket and, if it is to have one, its card."""
        command = [sys.executable, "-m", "xkv_store.cli", "gateway", "run", "--json"]
        command += ["--card", str(folder / "card")] if has_card else ["--databases", "0"]
        command += ["--socket-dir", str(folder / "sockets")]
        command += ["--linger-s", str(LINGER_S), *words]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
        with (folder / "gateway.log").open("ab") as log:
            started = time.monotonic()
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment)
        try:
            self.ready = self._await_ready(folder / "gateway.log")
        except BaseException:
            self.kill()
            raise
        self.start_s = time.monotonic() - started

    @property
    def pid(self) -> int:
        """The gateway's process id."""
        return self._process.pid

    @property
    def socket(self) -> Path:
        """Where it listens."""
        return Path(self.ready["socket"])

    def attach(self, role: Role = Role.RANK, *, ring_bytes: int, **others: Any) -> Client:
        """A client, as `attach`."""
        return attach(self.socket, role, ring_bytes=ring_bytes, **others)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """While the block runs, the process is stopped (SIGSTOP)."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def await_memory(self) -> None:
        """Until databases in memory have all of theirs, as on a card that has been full."""
        await_memory(self.socket)

    def cpu_s(self) -> float:
        """CPU seconds that the process has used, all threads."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident(self) -> Resident:
        """From /proc/PID/smaps: every page that is mapped in, by what it belongs to."""
        shared = dict.fromkeys(SHARED, 0.0)
        own = 0.0
        kind: str | None = None
        for line in Path(f"/proc/{self.pid}/smaps").read_text().splitlines():
            name, _, rest = line.partition(" ")
            if not name.endswith(":"):
                kind = next((key for key, mark in SHARED.items() if mark in rest), None)
            elif name == "Rss:":
                mib = int(rest.split()[0]) / 1024
                if kind is None:
                    own += mib
                else:
                    shared[kind] += mib
        return Resident(shared, own)

    def kill(self) -> None:
        """Kill -9."""
        self._process.kill()
        self._process.wait(END_S_MAX)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _await_ready(self, log: Path) -> dict[str, Any]:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], READY_S_MAX)
        line = self._process.stdout.readline() if readable else b""
        value: dict[str, Any] = json.loads(line) if line else {}
        if "ready" not in value:
            raise RuntimeError(f"the gateway is not ready: {value or log.read_text()[-2000:]}")
        return value


def attach(socket: Path, role: Role, *, ring_bytes: int, **others: Any) -> Client:
    """A client of the gateway on `socket`: alone in its engine unless `others` says so, in `Attachment`'s words.

    Half of the ring is for loads.
    """
    usual = Attachment(
        socket=socket,
        engine_id=ENGINE,
        role=role,
        rank=0,
        world_size=1,
        ring_bytes=ring_bytes,
        load_reserve_bytes=ring_bytes // 2,
        staged_bytes=0,
        fragment_bytes=FRAGMENT_BYTES,
        connect_timeout_ms=20_000,
        heartbeat_timeout_ms=HEARTBEAT_MS_MAX,
        embedded=None,
    )
    return Client.attach(replace(usual, **others))


def object_key(namespace: bytes, *numbers: int) -> ObjectKey:
    """A key whose hash is spread evenly, as vLLM's hashes are: the table's places depend on it."""
    return ObjectKey(namespace, 0, hashlib.sha256(repr(numbers).encode()).digest(), 0)


@contextmanager
def running(folder: Path, *words: str) -> Iterator[BenchGateway]:
    """A gateway on the card `folder`/card, killed at the end of the block."""
    gateway = BenchGateway(folder, words)
    try:
        yield gateway
    finally:
        gateway.kill()


def await_memory(socket: Path) -> None:
    """Until this gateway's databases in memory have all of theirs. TimeoutError."""
    with closing(Tool(socket)) as tool:
        for _ in range(MEMORY_POLLS_MAX):
            if all(one["memory"] != "taking" for one in json.loads(tool.status())["databases"]):
                return
            time.sleep(MEMORY_POLL_S)
    raise TimeoutError("the memory of the card's databases does not come")
