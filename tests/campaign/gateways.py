"""The gateway of a campaign's card, life after life, and everything that happens to it.

Owns: the process, its medium's plan, and each event that strikes the gateway or its card: how it is done, and whether
it has happened. Must not know: engines, requests, answers.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from campaign.damage import Damage
from campaign.kinds import DAMAGES, KILL_POINTS, plan_of
from stand.gateways import leftovers
from xkv_store.errors import UserError
from xkv_store.geometry import HEADER_BYTES, SUPERBLOCK_BYTES
from xkv_store.testing.faulty_gateway import effects, write_plan
from xkv_store.testing.processes import PORT, GatewayProcess
from xkv_store.tool import Tool

if TYPE_CHECKING:
    import random

    from campaign.kinds import Draw

SLOT_BYTES: Final = 65_536  # small: an object has many fragments, in both databases
DATABASES: Final = 2
GRACE_MS: Final = 500
RING_BYTES: Final = 64 << 20
HEARTBEAT_TIMEOUT_MS: Final = 1_000
LOAD_TIMEOUT_MS: Final = 2_000
PENDING_TIMEOUT_MS: Final = 1_000
DOWN_S_MAX: Final = 3.0  # longer than a heartbeat's bound, so that engines see it
STOPPED_S: Final = (1.2, 3.0)  # the same, for SIGSTOP
STOPPED_LONG_S: Final = 60.0
LATE_POINT_S: Final = 1.0  # a commit or an eviction may come after the batch
FREED_S_MAX: Final = 10.0  # sessions and slots of an engine that has gone, on a busy machine
STARTS_MAX: Final = 5  # until one comes up; most media leave a start alone
NTH_MAX: Final = 4  # which time of reaching a point is the one
VERSION_OFFSET: Final = 8  # of the format's version in a superblock (docs/format.md)
INDEX_FILE: Final = "data.mdb"
INDEX_FRONT_BYTES: Final = 8_192  # LMDB's two meta pages


class GatewayOfCampaign:
    """One card and who serves it. Close it (`contextlib.closing`)."""

    def __init__(self, folder: Path, *, capacity: str, rng: random.Random, media: Draw, proves: bool) -> None:
        self._folder = folder
        self._capacity = capacity
        self._rng = rng
        self._media = media
        self._proves = proves
        self.sockets = Path(tempfile.mkdtemp(prefix="xkv-"))  # a socket's path has at most 107 bytes
        self._card = folder / "card"
        self._points = folder / "points"
        self._damage = Damage(self._card, SLOT_BYTES, rng)
        self._counted = 0  # effects that are in `_effects`, or have been taken
        self._effects: Counter[str] = Counter()
        self._process: GatewayProcess | None = None
        self.medium = ""
        self.long_stops = 0  # how many stops of a minute are still to come
        folder.mkdir(parents=True)
        self.start()

    @property
    def extra(self) -> dict[str, Any]:
        """The keys by which an engine finds this gateway, and bounds that make a campaign go on."""
        return {
            "xkv.port": PORT,
            "xkv.socket_dir": str(self.sockets),
            "xkv.ring_bytes": RING_BYTES,
            "xkv.fragment_bytes": SLOT_BYTES - HEADER_BYTES,
            "xkv.heartbeat_timeout_ms": HEARTBEAT_TIMEOUT_MS,
            "xkv.load_timeout_ms": LOAD_TIMEOUT_MS,
            "xkv.pending_timeout_ms": PENDING_TIMEOUT_MS,
        }

    @property
    def alive(self) -> bool:
        """Whether a gateway serves."""
        return self._process is not None and self._process.alive

    # --- lives ------------------------------------------------------------------------------------------------

    def _new(self) -> GatewayProcess:
        return GatewayProcess(
            card=self._card,
            socket_dir=self.sockets,
            points=self._points,
            options=[
                *("--capacity", self._capacity, "--databases", str(DATABASES), "--slot-bytes", str(SLOT_BYTES)),
                *("--grace-ms", str(GRACE_MS)),
            ],
            faults=self._folder / "faults",
        )

    def _prepare(self) -> None:
        """The next life's medium. What took effect until now was its predecessor's doing."""
        self._count_effects()
        self.medium = self._media.deal()
        write_plan(
            self._folder / "faults", plan_of(self.medium, seed=self._rng.randrange(1 << 32), proves=self._proves)
        )

    def start(self) -> None:
        """A new life, on another medium. One that makes the start itself an error is followed by another."""
        assert self._process is None
        refusals: list[str] = []
        while len(refusals) < STARTS_MAX:
            self._prepare()
            try:
                self._process = self._new()
            except RuntimeError as error:
                refusals.append(f"{self.medium}: {error}")
            else:
                return
        raise AssertionError(f"no gateway comes up: {refusals}")

    def revive(self) -> None:
        """A new life, if the last one has ended."""
        if self._process is not None and not self._process.alive:
            self._bury()
        if self._process is None:
            self.start()

    def _bury(self) -> None:
        assert self._process is not None
        self._process.end()
        self._process = None
        self.disarm()
        for hold in self._points.glob("*.hold"):
            hold.unlink()

    def kill(self) -> None:
        """Kill -9."""
        if self.alive:
            assert self._process is not None
            self._process.kill()
        if self._process is not None:
            self._bury()

    def take_effects(self) -> Counter[str]:
        """How often each kind of the medium's faults took effect since the last call."""
        self._count_effects()
        taken, self._effects = self._effects, Counter()
        return taken

    def _count_effects(self) -> None:
        total = effects(self._folder / "faults").total()
        self._effects[self.medium] += total - self._counted
        self._counted = total

    def status(self) -> dict[str, Any] | None:
        """The gateway's own account; None where it does not answer."""
        try:
            with contextlib.closing(Tool(self.sockets / f"{PORT}.sock")) as tool:
                found: dict[str, Any] = json.loads(tool.status())
        except UserError:
            return None
        return found

    def leftovers(self) -> str:
        """What the gateway still has of engines that have gone, after the time that it is given; empty if nothing."""
        return leftovers(self.status, FREED_S_MAX)

    # --- a point at which it dies -----------------------------------------------------------------------------

    def arm(self, kind: str) -> None:
        """Let the gateway die at the kind's next point."""
        point = self._rng.choice(KILL_POINTS[kind])
        (self._points / f"{point}.reached").unlink(missing_ok=True)
        nth = 1 if kind in ("kill_at_start", "kill_at_end") else self._rng.randint(1, NTH_MAX)
        (self._points / f"{point}.kill").write_text(str(nth), encoding="ascii")

    def disarm(self) -> None:
        """From now on no point is deadly."""
        for kill in self._points.glob("*.kill"):
            kill.unlink()

    def has_died(self) -> bool:
        """Whether it died at a point that is armed, within the time that a late one takes."""
        deadline = time.monotonic() + LATE_POINT_S
        while self.alive and time.monotonic() < deadline:
            time.sleep(0.01)
        died = not self.alive
        self.disarm()
        return died

    # --- events -----------------------------------------------------------------------------------------------

    def strike(self, kind: str) -> int:
        """Carry the event out; how often it has happened."""
        if kind in DAMAGES:
            return self._damage.do(kind)
        return int(getattr(self, f"_{kind}")())

    def _kill_at_start(self) -> bool:
        self.kill()
        self.arm("kill_at_start")
        refused = self._is_refused()
        self.disarm()
        self.start()
        return refused

    def _kill_at_end(self) -> bool:
        assert self._process is not None
        self.arm("kill_at_end")
        self._process.signal(signal.SIGTERM)
        died = self._process.wait() == -signal.SIGKILL
        self._bury()
        self.start()
        return died

    def _kill_anywhere(self) -> bool:
        self.kill()
        time.sleep(self._rng.uniform(0, DOWN_S_MAX))
        self.start()
        return True

    def _restart_within_a_heartbeat(self) -> bool:
        began = time.monotonic()
        self.kill()
        self.start()
        return time.monotonic() - began < HEARTBEAT_TIMEOUT_MS / 1_000

    def _restart_clean(self) -> bool:
        assert self._process is not None
        self._process.signal(signal.SIGTERM)
        ended = self._process.wait() == 0
        self._bury()
        self.start()
        return ended

    def _gateway_stopped(self) -> bool:
        assert self._process is not None
        seconds = self._rng.uniform(*STOPPED_S)
        if self.long_stops:
            self.long_stops -= 1
            seconds = STOPPED_LONG_S
        self._process.signal(signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            self._process.signal(signal.SIGCONT)
        return True

    def _two_gateways(self) -> bool:
        """Both start at once, on the same card and socket."""
        self.kill()
        self._prepare()
        started: list[GatewayProcess] = []

        def start() -> None:
            with contextlib.suppress(RuntimeError):
                started.append(self._new())

        threads = [threading.Thread(target=start) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if len(started) == 1:
            (self._process,) = started
            return True
        if not started:
            self.start()  # the medium let neither of them open the card
            return False
        for process in started:
            process.end()
        raise AssertionError("two gateways serve one card")

    def _newer_format(self) -> bool:
        self.kill()
        database = self._card / "db-0.xkv"
        before = database.read_bytes()[: 2 * SUPERBLOCK_BYTES]
        newer = bytearray(before)
        for copy in (0, SUPERBLOCK_BYTES):
            newer[copy + VERSION_OFFSET] = 0xFE
        _overwrite(database, bytes(newer))
        refused = self._is_refused()
        untouched = database.read_bytes()[: 2 * SUPERBLOCK_BYTES] == newer
        _overwrite(database, before)
        self.start()
        if not (refused and untouched):
            raise AssertionError(f"a card of a newer format: refused {refused}, left as it was {untouched}")
        return True

    def _index_lost(self) -> bool:
        self.kill()
        (self._card / "index" / INDEX_FILE).unlink()
        self.start()
        return True

    def _index_damaged(self) -> bool:
        self.kill()
        _overwrite(self._card / "index" / INDEX_FILE, self._rng.randbytes(INDEX_FRONT_BYTES))
        self.start()
        return True

    def _is_refused(self) -> bool:
        """Whether a gateway does not come to serve the card as it is now."""
        self._prepare()
        try:
            process = self._new()
        except RuntimeError:
            return True
        process.end()
        return False

    # --- the end ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End it, and remove the card."""
        self.kill()
        shutil.rmtree(self.sockets, ignore_errors=True)
        shutil.rmtree(self._folder, ignore_errors=True)


def _overwrite(path: Path, front: bytes) -> None:
    with path.open("r+b") as file:
        file.write(front)
