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
    from collections.abc import Sequence

    from harness.story import Bytes

SETTLE_S_MAX = 15.0
POLL_S = 0.01
CAPACITY = "128MiB"


class Gateway:
    """One card and the gateway that serves it. `beside`: another one, in whose sockets' folder it has the next port.

    `alone`: the card is the remote that `options` name, and nothing else.
    """

    def __init__(
        self,
        folder: Path,
        *,
        slot_bytes: int = SLOT_BYTES,
        beside: Gateway | None = None,
        options: Sequence[str] = (),
        alone: bool = False,
    ) -> None:
        self._folder = folder
        self._alone = alone
        self._options = ["--capacity", CAPACITY, "--slot-bytes", str(slot_bytes), *options]
        # Short, whatever the test is called: a socket's path has at most 107 bytes.
        self._made: tempfile.TemporaryDirectory[str] | None = None
        if beside is None:
            self._made = tempfile.TemporaryDirectory(prefix="xkv-")
            self._sockets, self.port = Path(self._made.name), PORT
        else:
            self._sockets, self.port = beside._sockets, beside.port + 1
        self._process: GatewayProcess | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self.start()

    @property
    def extra(self) -> dict[str, Any]:
        """The keys by which an engine finds this gateway."""
        verified = {"xkv.verify_hits": True} if self._alone else {}
        return {"xkv.port": self.port, "xkv.socket_dir": str(self._sockets), **verified}

    @property
    def process(self) -> GatewayProcess:
        """The process that serves now, with its named points."""
        assert self._process is not None, "no gateway runs"
        return self._process

    def start(self) -> None:
        """Start it, and wait until it serves."""
        assert self._process is None
        self._process = GatewayProcess(
            card=None if self._alone else self._folder / "card",
            socket_dir=self._sockets,
            points=self._folder / "points",
            options=self._options,
            port=self.port,
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
        if self._made is not None:
            self._made.cleanup()

    # --- what it says --------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Its own account: objects, object_bytes, counters and so on."""
        with self._tool() as tool:
            found: dict[str, Any] = json.loads(tool.status())
        return found

    def _tool(self) -> contextlib.closing[Tool]:
        return contextlib.closing(Tool(socket_for_port(self._sockets, self.port)))

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
        places = self._copies(content)
        for path, at in places:
            with path.open("r+b", buffering=0) as file:
                file.seek(at + content.nbytes // 2)
                (byte,) = file.read(1)
                file.seek(at + content.nbytes // 2)
                file.write(bytes([byte ^ 0xFF]))
                os.fsync(file.fileno())
        return len(places)

    def copies(self, content: Bytes) -> int:
        """How often `content` lies in the database files."""
        return len(self._copies(content))

    def _copies(self, content: Bytes) -> list[tuple[Path, int]]:
        wanted = content.tobytes()
        found = []
        for path in sorted((self._folder / "card").glob("db-*.xkv")):
            data = path.read_bytes()
            at = data.find(wanted)
            while at >= 0:
                found.append((path, at))
                at = data.find(wanted, at + len(wanted))
        return found

    def drop_damaged(self) -> int:
        """Have the whole card proved, and what is damaged taken off it; how many objects."""
        with self._tool() as tool:
            return sum(len(told.damaged) for told in tool.verify(drop=True))
