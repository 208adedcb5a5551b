"""Looks at a card from the side while it is flooded: its sums, objects that are leaving, and leases that are kept.

Owns: three threads, what each notes. Must not know: who puts, or what is judged by it.
"""

from __future__ import annotations

import heapq
import queue
import random
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from soak.objects import Objects, object_key
from xkv_store.client import LeaseObject, LoadStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from ranks.gateway import RunGateway
    from soak.flood import Flood
    from soak.outcome import Outcome
    from xkv_store.client import Client, Leased

SAMPLE_S: Final = 0.2  # between two looks at the gateway's sums
ROUND_S: Final = 0.02  # between two looks at the objects that are next to leave
WATCHED: Final = 48  # of those, at a time
AHEAD: Final = 1_500  # numbers behind the last one that left among which they are
BORED_ROUNDS: Final = 200  # that an object is watched and stays
WAITS: Final = (0.0, 0.7)  # of the grace, from the last time that the lookup table had the object
PACE_S: Final = 0.01  # between two leases that are kept
KEPT_S_MAX: Final = 1.0
KEPT_MAX: Final = 24  # leases at once
GUESSES_MAX: Final = 16
ANSWER_S_MAX: Final = 30.0


@dataclass(order=True, slots=True)
class Leaving:
    """An object that the lookup table had at `seen`, and has no more; to be loaded at `due`."""

    due: float
    number: int
    seen: float


class Watch:
    """All threads; each with a client of its own, or none. `close` raises what one of them has met."""

    def __init__(self, gateway: RunGateway, flood: Flood, outcome: Outcome, grace_s: float) -> None:
        self._gateway = gateway
        self._flood = flood
        self._outcome = outcome
        self._grace_s = grace_s
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._met: list[BaseException] = []
        self.active = False
        """Whether leases are asked for: not while rates are compared with those of a card that nobody looks at."""

    def start(self, loader: Client, keeper: Client, objects: Objects, seed: int) -> None:
        """Begin; the two clients lease, each in an engine of its own."""
        jobs = (
            self._sum_up,
            partial(self._follow, loader, objects, random.Random(seed)),
            partial(self._keep, keeper, objects, random.Random(seed + 1)),
        )
        for job in jobs:
            self._threads.append(threading.Thread(target=self._guarded, args=(job,), daemon=True))
            self._threads[-1].start()

    def close(self) -> None:
        """End."""
        self._stop.set()
        for thread in self._threads:
            thread.join(ANSWER_S_MAX + self._grace_s)
        if self._met:
            raise self._met[0]

    def _guarded(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # noqa: BLE001 -- raised in `close`
            self._met.append(error)

    def _note(self, counter: str, reason: str) -> None:
        with self._lock:
            self._outcome.note(counter, reason)

    # --- sums ---------------------------------------------------------------------------------------------

    def _sum_up(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            status = self._gateway.status()
            slots = status["slots"]
            self._outcome.status_samples += 1
            if sum(slots.values()) != status["slots_total"] or min(slots.values()) < 0:
                self._note("accounting_errors", f"{slots} of {status['slots_total']}")
            held = sum(one["bytes"] for one in status["namespaces"])
            if held != (status["slots_total"] - slots["free"]) * status["slot_bytes"]:
                self._note("accounting_errors", f"namespaces hold {held} bytes, and {slots} are the card's")

    # --- objects that are leaving -------------------------------------------------------------------------

    def _follow(self, client: Client, objects: Objects, draw: random.Random) -> None:
        watched: dict[int, list[float]] = {}  # when it was last seen, and how often
        due: list[Leaving] = []
        last = 0
        while not self._stop.wait(ROUND_S):
            if not self.active:
                watched.clear()
                due.clear()
                continue
            now = time.monotonic()
            table = client.table
            for number, seen in list(watched.items()):
                if table.lookup(object_key(number).tag) is not None:
                    seen[0], seen[1] = now, seen[1] + 1
                    if seen[1] > BORED_ROUNDS:
                        del watched[number]
                    continue
                del watched[number]
                last = max(last, number)
                if seen[1]:
                    heapq.heappush(due, Leaving(seen[0] + draw.uniform(*WAITS) * self._grace_s, number, seen[0]))
            while due and due[0].due <= now:
                self._load(client, objects, heapq.heappop(due))
            if not watched:
                last = self._first_held(client, last)
            while len(watched) < WATCHED and self._flood.next_number > last + AHEAD:
                watched.setdefault(draw.randrange(last + 1, last + AHEAD), [now, 0])

    def _first_held(self, client: Client, number: int) -> int:
        """The next number that the card has, about: where things leave."""
        table, end = client.table, self._flood.next_number
        while number < end and table.lookup(object_key(number).tag) is None:
            number += 7
        return number

    def _load(self, client: Client, objects: Objects, leaving: Leaving) -> None:
        leased = self._lease(client, objects, leaving.number)
        answered = time.monotonic()
        if leased.status is LoadStatus.OK:
            self._outcome.grace_loads += 1
            self._give_back(client, objects, leaving.number, leased)
        elif answered > leaving.seen + self._grace_s:
            self._outcome.late_loads += 1
        else:
            after = answered - leaving.seen
            self._note("lost_in_grace", f"object {leaving.number}: {leased.status.name} {after:.3f} s after a hit")

    def _lease(self, client: Client, objects: Objects, number: int) -> Leased:
        answers: queue.SimpleQueue[Leased] = queue.SimpleQueue()
        assert client.lease_budget.take(objects.fragments(number))
        client.leases.take([LeaseObject(object_key(number), 0, objects.fragments(number))], answers.put)
        leased = answers.get(timeout=ANSWER_S_MAX)
        if leased.status is not LoadStatus.OK:
            client.lease_budget.give(objects.fragments(number))
        return leased

    def _give_back(self, client: Client, objects: Objects, number: int, leased: Leased) -> None:
        """Compare every byte, ask whether the lease has held, and release it."""
        right = objects.lies(client.ring.array, leased.slots, number)
        if not client.leases.holds(leased):
            self._note("leases_broken", f"object {number}: its lease ended early")
        elif not right:
            self._note("wrong", f"object {number}: other bytes in a lease that holds")
        client.leases.release(leased)
        client.lease_budget.give(objects.fragments(number))

    # --- leases that are kept -----------------------------------------------------------------------------

    def _keep(self, client: Client, objects: Objects, draw: random.Random) -> None:
        """Any object of the card: leased, kept a while beside others, then compared."""
        kept: list[tuple[float, int, Leased]] = []
        while not self._stop.wait(PACE_S):
            number = self._any_held(client, draw)
            room = number is not None and client.lease_budget.free >= objects.fragments(number)
            if number is not None and room and self.active and len(kept) < KEPT_MAX:
                leased = self._lease(client, objects, number)
                if leased.status is LoadStatus.OK:
                    self._outcome.leases += 1
                    until = time.monotonic() + draw.uniform(0.0, KEPT_S_MAX)
                    heapq.heappush(kept, (until, number, leased))
                else:
                    self._note("lost_in_grace", f"object {number}: {leased.status.name} at once after a hit")
            while kept and kept[0][0] <= time.monotonic():
                _, number, leased = heapq.heappop(kept)
                self._give_back(client, objects, number, leased)
        for _, number, leased in kept:
            self._give_back(client, objects, number, leased)

    def _any_held(self, client: Client, draw: random.Random) -> int | None:
        """An object that the card has, of any age; None where a few guesses find none."""
        table, end = client.table, self._flood.next_number
        guesses = (draw.randrange(end) for _ in range(GUESSES_MAX if end else 0))
        return next((number for number in guesses if table.lookup(object_key(number).tag) is not None), None)
