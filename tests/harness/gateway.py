"""A gateway in a process of its own, on a card of its own, that can end and come back.

Owns: when the process runs, its socket's folder, what it says of itself, and damage done to its database file.
Must not know: vLLM, engines.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xkv_store.geometry import SLOT_BYTES
from xkv_store.sockets import socket_for_port
from xkv_store.testing.processes import PORT, GatewayProcess
from xkv_store.tool import Tool

if TYPE_CHECKING:
    from harness.story import Bytes

SETTLE_S_MAX = 15.0
POLL_S = 0.01
CAPACITY = "128MiB"


class Gateway:
    """One card and the gateway that serves it."""

    def __init__(self, folder: Path, *, slot_bytes: int = SLOT_BYTES) -> None:
        self._folder = folder
        self._options = ["--capacity", CAPACITY, "--slot-bytes", str(slot_bytes)]
        # Short, whatever the test is called: a socket's path has at most 107 bytes.
        self._sockets = tempfile.TemporaryDirectory(prefix="xkv-")
        self._process: GatewayProcess | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self.start()

    @property
    def extra(self) -> dict[str, Any]:
        """The keys by which an engine finds this gateway."""
        return {"xkv.port": PORT, "xkv.socket_dir": self._sockets.name}

    @property
    def process(self) -> GatewayProcess:
        """The process that serves now, with its named points."""
        assert self._process is not None, "no gateway runs"
        return self._process

    def start(self) -> None:
        """Start it, and wait until it serves."""
        assert self._process is None
        self._process = GatewayProcess(
            card=self._folder / "card",
            socket_dir=Path(self._sockets.name),
            points=self._folder / "points",
            options=self._options,
        )

    def stop(self) -> None:
        """End it in order."""
        self.process.signal(signal.SIGTERM)
        assert self.process.wait() == 0
        self._forget()

    def kill(self) -> None:
        """Kill -9."""
        self.process.kill()
        self._forget()

    def _forget(self) -> None:
        self.process.end()
        self._process = None

    def close(self) -> None:
        """End it, however it is, and give its socket's folder up."""
        if self._process is not None:
            self._forget()
        self._sockets.cleanup()

    # --- what it says --------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Its own account: objects, object_bytes, counters and so on."""
        with contextlib.closing(Tool(socket_for_port(Path(self._sockets.name), PORT))) as tool:
            found: dict[str, Any] = json.loads(tool.status())
        return found

    def await_objects(self, objects: int) -> dict[str, Any]:
        """Wait until the card holds exactly so many objects, and give the status."""
        end = time.monotonic() + SETTLE_S_MAX
        while True:
            status = self.status()
            if status["objects"] == objects and status["uncommitted"] == 0:
                return status
            if time.monotonic() > end:
                raise AssertionError(f"{status['objects']} objects on the card, not {objects}: {status}")
            time.sleep(POLL_S)

    # --- damage --------------------------------------------------------------------------------------------------

    def damage(self, content: Bytes) -> int:
        """Change one byte of every copy of `content` in the database files; how many there were."""
        wanted = content.tobytes()
        found = 0
        for path in sorted((self._folder / "card").glob("db-*.xkv")):
            data = path.read_bytes()
            at = data.find(wanted)
            while at >= 0:
                found += 1
                with path.open("r+b", buffering=0) as file:
                    file.seek(at + len(wanted) // 2)
                    file.write(bytes([data[at + len(wanted) // 2] ^ 0xFF]))
                    os.fsync(file.fileno())
                at = data.find(wanted, at + len(wanted))
        return found
