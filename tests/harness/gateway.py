"""A real gateway process on a card of its own.

Owns: the process (started, stopped, killed by its pid), its socket's folder, what it says of itself, and damage
done to its database file.
Must not know: vLLM, engines.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xkv_store.sockets import socket_for_port
from xkv_store.tool import Tool

if TYPE_CHECKING:
    from harness.story import Bytes

START_S_MAX = 30.0
END_S_MAX = 20.0
SETTLE_S_MAX = 15.0
POLL_S = 0.01
PORT = 5557  # names a socket in a folder of this gateway's own
CAPACITY = "128MiB"


class Gateway:
    """One card and the gateway that serves it; can be started again after an end."""

    def __init__(self, folder: Path, *, slot_bytes: int | None = None, points: Path | None = None) -> None:
        self._card = folder / "card"
        self._log = folder / "gateway.log"
        # Short, whatever the test is called: a socket's path has at most 107 bytes.
        self._sockets = tempfile.TemporaryDirectory(prefix="xkv-")
        self._slot_bytes = slot_bytes
        self._points = points
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self.start()

    @property
    def extra(self) -> dict[str, Any]:
        """The keys by which an engine finds this gateway."""
        return {"xkv.port": PORT, "xkv.socket_dir": self._sockets.name}

    def start(self) -> None:
        """Start it, and wait until it serves."""
        assert self._process is None
        options = ["--card", self._card, "--port", PORT, "--socket-dir", self._sockets.name, "--capacity", CAPACITY]
        if self._slot_bytes is not None:
            options += ["--slot-bytes", self._slot_bytes]
        # vLLM puts its own libraries into LD_PRELOAD when it is configured; they are none of the gateway's.
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        if self._points is not None:
            environment["XKV_POINTS"] = str(self._points)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "xkv_store.cli", "gateway", "run", "--json", *map(str, options)],
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
            )
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], START_S_MAX)
        line = self._process.stdout.readline() if readable else b""
        if not line:
            self.kill()
            raise AssertionError(f"the gateway does not start: {self._log.read_text()[-2000:]}")
        assert json.loads(line)["ready"]

    def stop(self) -> None:
        """End it in order."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Kill -9."""
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(END_S_MAX)
        finally:
            if process.returncode is None:
                process.kill()
                process.wait(END_S_MAX)
            if process.stdout is not None:
                process.stdout.close()

    def close(self) -> None:
        """End it and give its socket's folder up."""
        self.stop()
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
        for path in sorted(self._card.glob("db-*.xkv")):
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
