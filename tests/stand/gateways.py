"""Gateways for real engines: `python -m xkv_store.cli gateway run` as a process, and the embedded ones.

Owns: the process from its start to its end by its id, its card, its socket's folder and its named points.
Must not know: engines, what is on a card.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stand.engines import StandError, alive, await_end, log_tail
from xkv_store.errors import UserError
from xkv_store.geometry import HEADER_BYTES, SLOT_BYTES
from xkv_store.sockets import socket_for_card
from xkv_store.testing import faulty_gateway
from xkv_store.testing.points import ENVIRONMENT_NAME, POINTS
from xkv_store.tool import Tool

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Self

    from xkv_store.testing.faults import FaultPlan

PORT = 5557  # names the socket in a folder of the test's own; nothing listens on the network
START_S_MAX = 30.0
END_S_MAX = 30.0
POINT_S_MAX = 30.0
POLL_S = 0.01
ENGINE_ROLES = ("scheduler", "rank")  # and not tools, which look at it
RING_BYTES = 128 * 1024 * 1024  # half of it for stores: all that the largest case has under way


class Gateway:
    """One card and the gateway that serves it, which can end and come back."""

    def __init__(
        self,
        folder: Path,
        *,
        capacity: str = "256MiB",
        databases: int = 1,
        slot_bytes: int = SLOT_BYTES,
        grace_ms: int = 0,
        faults: FaultPlan | None = None,
        before: Gateway | None = None,
        options: Sequence[str] = (),
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`databases`: 0 for a card that is the remote alone.

        `faults`: what goes wrong with its medium. `before`: the gateway of the rank before, on the port before.

        `options`: further ones of its command; `prefix`: what comes before the command, so that it runs elsewhere;
        `environment`: beside our own.
        """
        self._is_first = before is None
        self._port: int = PORT if before is None else before._port + 1
        # Short, whatever the test is called: a socket's path has at most 107 bytes.
        self._sockets: Path = Path(tempfile.mkdtemp(prefix="xkv-")) if before is None else before._sockets
        self._fragment_bytes = slot_bytes - HEADER_BYTES
        self._verified: dict[str, Any] = {} if databases else {"xkv.verify_hits": True}
        self._points = folder / "points"
        self._log = folder / "gateway.log"
        self._environment = {**os.environ, **(environment or {}), ENVIRONMENT_NAME: str(self._points)}
        program = "xkv_store.cli"
        if faults is not None:
            program = "xkv_store.testing.faulty_gateway"
            self._environment[faulty_gateway.ENVIRONMENT_NAME] = str(folder / "faults")
        self._command = [
            *(*prefix, sys.executable, "-m", program, "gateway", "run", "--json", "--port", str(self._port)),
            *(("--card", str(folder / "card")) if databases else ()),
            *("--socket-dir", str(self._sockets), "--capacity", capacity),
            *("--databases", str(databases), "--slot-bytes", str(slot_bytes), "--grace-ms", str(grace_ms)),
            *options,
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._points.mkdir(parents=True)
        if faults is not None:
            faulty_gateway.write_plan(folder / "faults", faults)
        self.start()

    @property
    def extra(self) -> dict[str, Any]:
        """The keys by which an engine finds this gateway."""
        return {
            "xkv.port": self._port,
            "xkv.socket_dir": str(self._sockets),
            "xkv.ring_bytes": RING_BYTES,
            "xkv.fragment_bytes": self._fragment_bytes,
            **self._verified,
        }

    @property
    def pid(self) -> int:
        """The process that serves now."""
        assert self._process is not None, "no gateway runs"
        return self._process.pid

    def start(self) -> None:
        """Start it and wait until it serves."""
        assert self._process is None
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment,
            )
        assert self._process.stdout is not None
        line = b""
        if select.select([self._process.stdout], [], [], START_S_MAX)[0]:
            line = self._process.stdout.readline()
        if not line or not json.loads(line).get("ready"):
            self.kill()
            raise StandError(f"the gateway is not ready: {line!r}\n{log_tail(self._log)}")

    def _end(self, number: signal.Signals) -> int:
        assert self._process is not None
        self._process.send_signal(number)
        try:
            code = self._process.wait(END_S_MAX)
        finally:
            self._process.kill()
            self._process.wait(END_S_MAX)
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None
        return code

    def stop(self) -> None:
        """End it in order."""
        code = self._end(signal.SIGTERM)
        assert code == 0, f"the gateway ended with {code}\n{log_tail(self._log)}"

    def kill(self) -> None:
        """SIGKILL; then nothing is held any more."""
        self._end(signal.SIGKILL)
        for hold in self._points.glob("*.hold"):
            hold.unlink()

    def hold(self, point: str) -> None:
        """Whoever reaches this point in the gateway from now on waits there."""
        assert point in POINTS
        (self._points / f"{point}.reached").unlink(missing_ok=True)
        (self._points / f"{point}.hold").touch()

    def let_go(self, point: str) -> None:
        """Go on."""
        (self._points / f"{point}.hold").unlink()

    def await_point(self, point: str) -> None:
        """Return when the gateway stands at a point that is held."""
        mark = self._points / f"{point}.reached"
        deadline = time.monotonic() + POINT_S_MAX
        while not mark.exists():
            if time.monotonic() > deadline or not alive(self.pid):
                raise StandError(f"the gateway did not reach {point}\n{log_tail(self._log)}")
            time.sleep(POLL_S)

    def status(self) -> dict[str, Any]:
        """Its own account: objects, sessions, counters and so on."""
        with contextlib.closing(Tool(self._sockets / f"{self._port}.sock")) as tool:
            found: dict[str, Any] = json.loads(tool.status())
        return found

    def close(self) -> None:
        """End it, however it is, and give its socket's folder up."""
        if self._process is not None:
            self.kill()
        if self._is_first:
            shutil.rmtree(self._sockets)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            sys.stderr.write(f"--- {self._log}\n{log_tail(self._log)}\n")
        self.close()


def leftovers(status: Callable[[], dict[str, Any] | None], seconds_max: float) -> str:
    """What a gateway still has of engines that have gone, after the time that it is given; empty if nothing."""
    deadline = time.monotonic() + seconds_max
    while True:
        found = status()
        left = "it does not answer"
        if found is not None:
            sessions = [one for one in found["sessions"] if one["role"] in ENGINE_ROLES]
            left = ""
            if found["engines"] or sessions or found["slots"]["in_flight"]:
                left = f"engines {found['engines']}, sessions {sessions}, slots {found['slots']}"
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(POLL_S)


class EmbeddedCard:
    """A card whose gateway the engines start themselves. Close it: the gateway is nobody's child."""

    def __init__(self, folder: Path, *, capacity_bytes: int, linger_s: float) -> None:
        self._sockets = Path(tempfile.mkdtemp(prefix="xkv-"))
        self.folder = folder
        self.extra: dict[str, Any] = {
            "xkv.path": str(folder),
            "xkv.socket_dir": str(self._sockets),
            "xkv.capacity_bytes": capacity_bytes,
            "xkv.linger_s": linger_s,
            "xkv.ring_bytes": RING_BYTES,
        }

    @property
    def socket(self) -> Path:
        """Where its gateway listens while it lives."""
        return socket_for_card(self._sockets, self.folder)

    def gateway_pid(self) -> int | None:
        """The gateway that serves the card now, or None."""
        try:
            with contextlib.closing(Tool(self.socket)) as tool:
                return tool.pid
        except UserError:
            return None

    def end_gateway(self) -> int | None:
        """End the gateway that serves the card, if one does, and wait for its end; its process id."""
        pid = self.gateway_pid()
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            try:
                await_end(pid, END_S_MAX)
            except StandError:
                os.kill(pid, signal.SIGKILL)
        return pid

    def close(self) -> None:
        """End the gateway and remove the card."""
        self.end_gateway()
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self._sockets, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            sys.stderr.write(f"--- {self.folder}/gateway.log\n{log_tail(self.folder / 'gateway.log')}\n")
        self.close()
