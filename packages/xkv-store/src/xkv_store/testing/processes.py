"""A real gateway in a process of its own, for tests that stop, kill and restart it.

Owns: the process, from start to its end by its pid, and the folder of its named points.
Must not know: messages, cards' contents.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from .points import ENVIRONMENT_NAME, POINTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

START_S_MAX: Final = 30.0  # imports, on a machine that does other things too, and a card of test size
END_S_MAX: Final = 30.0  # the drain's bound, with room
POINT_S_MAX: Final = 20.0
POLL_S: Final = 0.005
PORT: Final = 5557  # names the socket in a folder of the test's own; nothing listens on the network


class GatewayProcess:
    """`xkv gateway run` as a child. Make it with `running_gateway`."""

    def __init__(self, *, card: Path, socket_dir: Path, points: Path, options: Sequence[str]) -> None:
        self.points = points
        points.mkdir(exist_ok=True)
        package = __name__.rpartition(".testing.")[0]
        command = [sys.executable, "-m", f"{package}.cli", "gateway", "run", "--json"]
        command += ["--card", str(card), "--socket-dir", str(socket_dir), "--port", str(PORT), *options]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
            ENVIRONMENT_NAME: str(points),
        }
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
        try:
            self.ready = self._await_ready()
        except BaseException:
            self.end()
            raise

    @property
    def pid(self) -> int:
        """The gateway's process id."""
        return self.process.pid

    def _await_ready(self) -> dict[str, Any]:
        output = self.process.stdout
        assert output is not None
        readable, _, _ = select.select([output], [], [], START_S_MAX)
        line = output.readline() if readable else b""
        value: dict[str, Any] = json.loads(line) if line else {}
        if "ready" not in value:
            raise RuntimeError(f"the gateway is not ready: {value or 'it said nothing'}")
        return value

    def hold(self, point: str) -> None:
        """Whoever reaches this point in the gateway waits there."""
        assert point in POINTS
        (self.points / f"{point}.hold").touch()

    def let_go(self, point: str) -> None:
        """Go on."""
        (self.points / f"{point}.hold").unlink(missing_ok=True)

    def times_reached(self, point: str) -> int:
        """How often this point was reached, by all processes that used the folder."""
        mark = self.points / f"{point}.reached"
        return len(mark.read_bytes().splitlines()) if mark.exists() else 0

    def await_point(self, point: str, times: int = 1) -> None:
        """Return when the gateway has reached this point so often."""
        assert point in POINTS
        deadline = time.monotonic() + POINT_S_MAX
        while self.times_reached(point) < times:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the gateway did not reach {point}")
            if self.process.poll() is not None:
                raise RuntimeError(f"the gateway has ended with {self.process.returncode}")
            time.sleep(POLL_S)

    def kill(self) -> None:
        """Kill -9; then nothing is held any more."""
        self.process.kill()
        self.process.wait(END_S_MAX)
        for hold in self.points.glob("*.hold"):
            hold.unlink()

    def terminate(self) -> int:
        """SIGTERM; returns the exit code."""
        self.process.terminate()
        return self.process.wait(END_S_MAX)

    def end(self) -> None:
        """Whatever its state: it is gone afterwards."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(END_S_MAX)
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextmanager
def running_gateway(
    folder: Path, *, capacity: str = "32MiB", slot_bytes: int = 65_536, options: Sequence[str] = ()
) -> Iterator[GatewayProcess]:
    """A gateway on the card `folder`/card; ended with the block, however that ends."""
    gateway = GatewayProcess(
        card=folder / "card",
        socket_dir=folder / "sockets",
        points=folder / "points",
        options=["--capacity", capacity, "--slot-bytes", str(slot_bytes), *options],
    )
    try:
        yield gateway
    finally:
        gateway.end()
