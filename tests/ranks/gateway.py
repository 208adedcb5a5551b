"""The gateway of a run, in a process of its own: `python -m ranks.gateway [--canary] WORDS`.

Owns: its start, its end by its pid, its counters. Must not know: ranks.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

from ranks import broken
from ranks.objects import OBJECTS, SLOT_BYTES, SLOTS_EACH
from xkv_store import cli
from xkv_store.tool import Tool

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

READY_S_MAX: Final = 60.0
END_S_MAX: Final = 30.0
PORT: Final = 5557  # names the socket; nothing listens on the network
CAPACITY: Final = (2 * OBJECTS * SLOTS_EACH + 64) * SLOT_BYTES  # the working set, and not much more
WORKING_SET: Final = ("--capacity", str(CAPACITY), "--slot-bytes", str(SLOT_BYTES))


class RunGateway:
    """`xkv gateway run`, by `serve` and what it takes before the words; on a card as `words` say."""

    def __init__(
        self,
        folder: Path,
        *,
        canary: bool = False,
        serve: Sequence[str] = ("ranks.gateway",),
        words: Sequence[str] = WORKING_SET,
    ) -> None:
        self.socket = folder / "sockets" / f"{PORT}.sock"
        named = ["gateway", "run", "--json", "--card", str(folder / "card"), "--socket-dir", str(self.socket.parent)]
        named += ["--port", str(PORT), *words]
        command = [sys.executable, "-m", *serve, *(["--canary"] if canary else []), *named]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
        with (folder / "gateway.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment)
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], READY_S_MAX)
        if not readable or "ready" not in json.loads(self._process.stdout.readline() or b"{}"):
            self.end()
            raise RuntimeError(f"the gateway is not ready: {(folder / 'gateway.log').read_text()[-2_000:]}")

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def status(self) -> dict[str, Any]:
        """Its own words."""
        with closing(Tool(self.socket)) as tool:
            found: dict[str, Any] = json.loads(tool.status())
        return found

    def counters(self) -> dict[str, int]:
        """What has happened so far."""
        found: dict[str, int] = self.status()["counters"]
        return found

    def end(self) -> None:
        """Drain, or be killed."""
        self._process.terminate()
        try:
            self._process.wait(END_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_S_MAX)
        assert self._process.stdout is not None
        self._process.stdout.close()


def main(arguments: list[str]) -> int:
    """Serve, sound or broken."""
    if arguments[:1] == ["--canary"]:
        broken.break_gateway()
        arguments = arguments[1:]
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
