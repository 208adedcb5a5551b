"""A real gateway in a process of its own, for tests that stop, kill and restart it.

Owns: the process, from start to its end by its pid, and the folder of its named points.
Must not know: messages, cards' contents.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from .. import cli  # noqa: TID252  the package may have another name
from . import faulty_gateway
from . import points as points_of
from .points import ENVIRONMENT_NAME, POINTS

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator, Sequence
    from multiprocessing.connection import Connection
    from pathlib import Path

    from .faults import FaultPlan, Kind, Operation

START_S_MAX: Final = 30.0  # on a machine that does other things too
END_S_MAX: Final = 30.0  # the drain's bound, with room
POINT_S_MAX: Final = 20.0
POLL_S: Final = 0.005
PORT: Final = 5557  # names the socket in a folder of the test's own; nothing listens on the network

# Each gateway is forked from a server process that has imported everything: a start takes a tenth of a second. What
# runs the tests is imported again in each child, so it is imported in the server too.
_PROCESSES: Final = multiprocessing.get_context("forkserver")
# The last two are imported when they are first used; what is not there is passed over.
_PROCESSES.set_forkserver_preload([__name__, "pytest", "lmdb", "typer._adapters"])


def _end_with(owner: int) -> None:
    """Let this process be killed as soon as the owner's has ended, however that ended."""
    handle = os.pidfd_open(owner)

    def watch() -> None:
        select.select([handle], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _run(words: Sequence[str], points: str, faults: str, output: Connection, owner: int) -> None:
    _end_with(owner)
    os.dup2(output.fileno(), 1)
    os.environ[ENVIRONMENT_NAME] = points
    points_of.look_at_environment()
    if faults:
        os.environ[faulty_gateway.ENVIRONMENT_NAME] = faults
    sys.exit(faulty_gateway.main(words) if faults else cli.main(words))


class GatewayProcess:
    """`xkv gateway run` as a process of its own. Make it with `running_gateway`."""

    def __init__(
        self,
        *,
        card: Path | None,
        socket_dir: Path,
        points: Path,
        options: Sequence[str],
        faults: Path | None = None,
        port: int = PORT,
    ) -> None:
        """`card`: None for a card that is the remote alone."""
        self.points = points
        self._faults = faults
        points.mkdir(exist_ok=True)
        words = ["gateway", "run", "--json", *(["--databases", "0"] if card is None else ["--card", str(card)])]
        words += ["--socket-dir", str(socket_dir), "--port", str(port), *options]
        self._output, output = _PROCESSES.Pipe(duplex=False)
        self._process = _PROCESSES.Process(
            target=_run, args=(words, str(points), str(faults or ""), output, os.getpid())
        )
        self._process.start()
        output.close()
        try:
            self.ready = self._await_ready()
        except BaseException:
            self.end()
            raise

    @property
    def pid(self) -> int:
        """The gateway's process id."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.is_alive()

    def _await_ready(self) -> dict[str, Any]:
        text = b""
        if self._output.poll(START_S_MAX):
            text = os.read(self._output.fileno(), 65_536)
        value: dict[str, Any] = json.loads(text) if text else {}
        if "ready" not in value:
            raise RuntimeError(f"the gateway is not ready: {value or 'it said nothing'}")
        return value

    def hold(self, point: str) -> None:
        """Whoever reaches this point in the gateway waits there."""
        assert point in POINTS
        (self.points / f"{point}.hold").touch()

    def kill_at(self, point: str, times: int = 1) -> None:
        """The gateway kills itself (-9) exactly there, when this folder's processes have been there so often."""
        assert point in POINTS
        (self.points / f"{point}.kill").write_text(str(times), encoding="ascii")

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
            if not self.alive:
                raise RuntimeError(f"the gateway has ended with {self._process.exitcode}")
            time.sleep(POLL_S)

    def effects(self) -> Counter[tuple[Operation, Kind]]:
        """What has gone wrong of the plan it was started with."""
        assert self._faults is not None
        return faulty_gateway.effects(self._faults)

    def kill(self) -> None:
        """Kill -9; then nothing is held any more."""
        self.signal(signal.SIGKILL)
        self.wait()
        for hold in self.points.glob("*.hold"):
            hold.unlink()

    def signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def wait(self, wait_s: float = END_S_MAX) -> int:
        """Wait for the end; the exit code, negative for a signal. TimeoutError where it does not end."""
        self._process.join(wait_s)
        if self._process.exitcode is None:
            raise TimeoutError(f"the gateway (pid {self.pid}) has not ended in {wait_s} s")
        return self._process.exitcode

    def end(self) -> None:
        """Whatever its state: it is gone afterwards."""
        if self.alive:
            self._process.kill()
            self._process.join(END_S_MAX)
        self._process.close()
        self._output.close()


@contextmanager
def running_gateway(
    folder: Path,
    *,
    capacity: str = "32MiB",
    slot_bytes: int = 65_536,
    options: Sequence[str] = (),
    faults: FaultPlan | None = None,
) -> Iterator[GatewayProcess]:
    """A gateway on the card `folder`/card; ended with the block, however that ends. `faults`: its medium's."""
    if faults is not None:
        faulty_gateway.write_plan(folder / "faults", faults)
    gateway = GatewayProcess(
        card=folder / "card",
        socket_dir=folder / "sockets",
        points=folder / "points",
        options=["--capacity", capacity, "--slot-bytes", str(slot_bytes), *options],
        faults=folder / "faults" if faults is not None else None,
    )
    try:
        yield gateway
    finally:
        gateway.end()
