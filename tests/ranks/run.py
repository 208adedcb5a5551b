"""A run: a gateway, a card with the working set, and phases in which all ranks of an engine replay jobs.

Owns: the phases (how much of the working set the ring holds), who is stopped or killed when, what ranks have told.
Must not know: how a rank checks what it loads.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from ranks.gateway import RunGateway
from ranks.objects import FRAGMENT_BYTES, OBJECT_BYTES, OBJECTS, SLOTS_EACH, content, object_key
from ranks.outcome import Outcome
from ranks.place import Place
from xkv_store.client import PutObject, StoredObject, StoreStatus
from xkv_store.geometry import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ROOM: Final = (1.25, 0.1, 0.5, 0.25)  # of the working set, that the shared region holds in each phase
MISCHIEF_S: Final = (0.6, 1.6)  # between one rank that is stopped or killed and the next
STOPPED_S: Final = (0.3, 2.5)
START_S_MAX: Final = 60.0  # for all ranks to attach
END_S_MAX: Final = 120.0  # for ranks to end what they have begun
PUT_S_MAX: Final = 20.0


@dataclass(slots=True)
class Options:
    """How a run goes."""

    ranks: int
    seconds: int
    seed: int
    canary: bool


class RankProcess:
    """One life of a rank."""

    def __init__(self, place: Place, log: Path) -> None:
        self.place = place
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
        command = [sys.executable, "-m", "ranks.rank", place.text()]
        with log.open("ab") as errors:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def signal(self, number: int) -> None:
        """Stop it, let it go on, or kill it."""
        self._process.send_signal(number)

    def wait(self, wait_s: float) -> int | None:
        """Its exit code; None where it has not ended in time, and is killed."""
        try:
            code: int | None = self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            code = None
        self._reader.join()
        return code

    @property
    def ended(self) -> bool:
        """Whether it has."""
        return self._process.poll() is not None

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self.lines.append(line.decode())


class Run:
    """All phases of one run."""

    def __init__(self, folder: Path, options: Options, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._options = options
        self._say = say
        self._draw = random.Random(options.seed)
        self._outcome = Outcome(options.ranks, options.canary)

    def run(self) -> Outcome:
        """The phases, one after the other, each with an engine of its own."""
        rooms = ROOM[1:2] if self._options.canary else ROOM
        gateway = RunGateway(self._folder, canary=self._options.canary)
        try:
            self.fill(gateway)
            for number, room in enumerate(rooms):
                self._phase(gateway, number, room, self._options.seconds / len(rooms))
                if not gateway.alive:
                    self._outcome.stuck += 1
                    self._outcome.reasons.append("the gateway has ended")
                    break
        finally:
            gateway.end()
        return self._outcome

    def _place(self, gateway: RunGateway, *, engine: str, rank: int, share: int, life: int) -> Place:
        options = self._options
        end = str(self._folder / f"end of {engine}")
        return Place(str(gateway.socket), engine, rank, options.ranks, share, options.seed, life, end, options.canary)

    def fill(self, gateway: RunGateway) -> None:
        """Put every object of the working set on the card, as rank 0 of an engine that ends then."""
        client = self._place(gateway, engine="fill", rank=0, share=SLOTS_EACH, life=0).attach()
        try:
            for number in range(OBJECTS):
                slots = client.store_region.take(SLOTS_EACH)
                assert slots is not None
                data = content(number).reshape(-1)
                for fragment, slot in enumerate(slots):
                    part = data[fragment * FRAGMENT_BYTES : (fragment + 1) * FRAGMENT_BYTES]
                    client.ring.array[slot, HEADER_BYTES : HEADER_BYTES + len(part)] = part
                answered = threading.Event()
                answers: list[StoredObject] = []

                def on_answer(
                    answer: StoredObject, answers: list[StoredObject] = answers, answered: threading.Event = answered
                ) -> None:
                    answers.append(answer)
                    answered.set()

                client.put([PutObject(object_key(number), OBJECT_BYTES, slots, 1, number, replace=False)], on_answer)
                assert answered.wait(PUT_S_MAX)
                assert answers[0].status is StoreStatus.CONFIRMED
        finally:
            client.close()

    def _phase(self, gateway: RunGateway, number: int, room: float, seconds: float) -> None:
        share = max(SLOTS_EACH, round(room * OBJECTS * SLOTS_EACH / self._options.ranks))
        before = gateway.counters()
        engine = f"phase {number}"
        lives = {}
        for rank in range(self._options.ranks):
            place = self._place(gateway, engine=engine, rank=rank, share=share, life=0)
            lives[rank] = [self._start(place)]
        self._await_all(lives)
        self._mischief(lives, time.monotonic() + seconds)
        (self._folder / f"end of {engine}").touch()
        loaded = self._collect([life for own in lives.values() for life in own])
        after = gateway.counters()
        counts = {name: after.get(name, 0) - before.get(name, 0) for name in ("reads", "leases_found", "leases_joined")}
        per_object = counts["reads"] / max(1, len(loaded))
        if room > 1:
            self._outcome.reads += counts["reads"]
            self._outcome.objects += len(loaded)
        self._say(
            f"room for {room:.0%}: {counts['reads']} reads of {len(loaded)} objects ({per_object:.2f} each), "
            f"{counts['leases_found']} found in the ring, {counts['leases_joined']} joined"
        )
        self._check_nothing_is_left(gateway)

    def _start(self, place: Place) -> RankProcess:
        return RankProcess(place, self._folder / f"rank-{place.rank}.log")

    def _await_all(self, lives: dict[int, list[RankProcess]]) -> None:
        """Until each rank has attached; what does not come is told when it has ended."""
        end = time.monotonic() + START_S_MAX
        while time.monotonic() < end and any(not own[0].lines and not own[0].ended for own in lives.values()):
            time.sleep(0.02)

    def _mischief(self, lives: dict[int, list[RankProcess]], until: float) -> None:
        """Now and then a rank is stopped for a while, or killed and started again."""
        while (left_s := until - time.monotonic()) > 1.0:
            rank = self._draw.randrange(self._options.ranks)
            victim = lives[rank][-1]
            if self._draw.random() < 0.6:
                victim.signal(signal.SIGSTOP)
                time.sleep(min(left_s, self._draw.uniform(*STOPPED_S)))
                victim.signal(signal.SIGCONT)
                self._outcome.stopped += 1
            else:
                victim.signal(signal.SIGKILL)
                self._outcome.killed += 1
                lives[rank].append(self._start(replace(victim.place, life=len(lives[rank]))))
            time.sleep(max(0.0, min(left_s, self._draw.uniform(*MISCHIEF_S))))

    def _collect(self, lives: list[RankProcess]) -> set[int]:
        loaded: set[int] = set()
        outcome = self._outcome
        end = time.monotonic() + END_S_MAX
        for life in lives:
            code = life.wait(max(1.0, end - time.monotonic()))
            if code not in {0, -signal.SIGKILL}:
                outcome.stuck += 1
                outcome.reasons.append(f"rank {life.place.rank} (life {life.place.life}) ended with {code}")
            for line in life.lines:
                try:
                    told = json.loads(line)
                except ValueError:
                    continue  # killed while it spoke
                outcome.jobs += told["jobs"]
                outcome.wrong += told["wrong"]
                outcome.timeouts += told["timeouts"]
                outcome.stuck += told["stuck"]
                outcome.misses += told["misses"]
                outcome.reasons += told["reasons"]
                loaded |= set(told["loaded"])
        return loaded

    def _check_nothing_is_left(self, gateway: RunGateway) -> None:
        """All ranks have ended, so no session is left a second later."""
        end = time.monotonic() + 2.0
        while gateway.status()["engines"] and time.monotonic() < end:
            time.sleep(0.05)
        if gateway.status()["engines"]:
            self._outcome.stuck += 1
            self._outcome.reasons.append("an engine whose ranks have ended is still attached")
