"""A run: a gateway, two engines of one model and one each of two others, and one of them killed every few seconds.

Owns: who sits at the gateway, its medium, who is killed when, what is left at the end.
Must not know: how an answer is judged.
"""

from __future__ import annotations

import random
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Final

from engines.outcome import Outcome
from engines.seat import FREED_S_MAX, OUTPUT_TOKENS, Model, Seat
from stand.cases import Stand, target
from stand.gateways import Gateway, leftovers
from stand.models import GEMMA, LLAMA
from stand.pools import Pool, candidates
from xkv_store.testing.faults import Fault, FaultPlan, Kind, Operation

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stand.models import Shape
    from stand.runs import Options

# The second model differs from the first in its weights alone: the same prompts have the same hashes there.
SEATS: Final = (
    ("llama", LLAMA),
    ("llama again", LLAMA),
    ("other llama", LLAMA.with_seed(1)),
    ("gemma3", GEMMA),
)
BLOCKS_PER_CHUNK: Final = {LLAMA.config_class: 4, GEMMA.config_class: 2}
PROMPTS: Final = 12
CAPACITY: Final = "512MiB"  # holds what all of them store: nothing is evicted, so no load has a reason to fail
SLOT_BYTES: Final = 65_536  # small: an object has many fragments, in both databases
DATABASES: Final = 2
BETWEEN_KILLS_S: Final = (1.0, 4.0)
SERVING_MIN: Final = 3  # before one is killed: then there are two survivors at least
LOOK_S: Final = 0.1

# As on a disk that others use: reads take long enough to be joined, and to be under way when somebody is killed.
SLOW: Final = Fault(operation=Operation.READ, kind=Kind.DELAY, probability=0.5, delay_s=0.03)
# For the canary, on a medium whose bytes nobody proves.
FLIPPED: Final = Fault(operation=Operation.READ, kind=Kind.FLIP, probability=0.5)


class Run:
    """All of it. `say` gets a line now and then."""

    def __init__(self, stand: Stand, folder: Path, options: Options, say: Callable[[str], None]) -> None:
        self._stand = stand
        self._folder = folder
        self._options = options
        self._say = say
        self._rng = random.Random(options.seed)
        self._outcome = Outcome(target().release, options, tuple(name for name, _ in SEATS))
        self._end_s = 0.0

    def run(self) -> Outcome:
        """Clean answers first, then the load."""
        pools = {shape.name: self._pool(shape) for shape in dict.fromkeys(shape for _, shape in SEATS)}
        plan = FaultPlan(
            (FLIPPED if self._options.canary else SLOW,), seed=self._options.seed, proves=not self._options.canary
        )
        with Gateway(
            self._folder / "gateway", capacity=CAPACITY, databases=DATABASES, slot_bytes=SLOT_BYTES, faults=plan
        ) as gateway:
            self._load(gateway, self._seats(gateway, pools))
            left = leftovers(gateway.status, FREED_S_MAX)
            if left:
                self._outcome.leaks += 1
                self._outcome.complain(f"left of engines that have gone: {left}")
            counters = gateway.status()["counters"]
            self._outcome.reads_joined = counters.get("reads_joined", 0)
            self._say(f"{counters.get('reads', 0)} reads, {self._outcome.reads_joined} joined one of another's")
        return self._outcome

    def _pool(self, shape: Shape) -> Pool:
        coming = candidates(shape, random.Random(self._options.seed))
        with self._stand.engine(self._stand.config(shape)) as engine:
            pool = Pool.ask(engine, coming, wanted=PROMPTS, output_tokens=OUTPUT_TOKENS)
        self._say(f"{shape.name}: {len(pool.prompts)} prompts, {pool.left_out} left out as rounding may turn them")
        return pool

    def _seats(self, gateway: Gateway, pools: dict[str, Pool]) -> list[Seat]:
        shapes = [shape.name for _, shape in SEATS]
        models = {name: Model(pool, shapes.count(name), self._options.seed) for name, pool in pools.items()}
        seats = []
        for name, shape in SEATS:
            blocks = BLOCKS_PER_CHUNK[shape.config_class]
            config = self._stand.offloading(shape, gateway, blocks_per_chunk=blocks)
            make = partial(self._stand.engine, config)
            seats.append(
                Seat(
                    name=name,
                    model=models[shape.name],
                    make=make,
                    gateway=gateway,
                    outcome=self._outcome,
                    seed=self._options.seed,
                )
            )
        return seats

    def _load(self, gateway: Gateway, seats: list[Seat]) -> None:
        for seat in seats:
            seat.start()
        self._say(f"{len(seats)} engines are ready")
        self._end_s = time.monotonic() + self._options.seconds
        threads = [threading.Thread(target=seat.serve, args=(self._is_over,)) for seat in seats]
        for thread in threads:
            thread.start()
        try:
            self._kill_some(seats)
        finally:
            self._end_s = 0.0
            for thread in threads:
                thread.join()

    def _is_over(self) -> bool:
        """The time, or where a canary has found what it had to."""
        return time.monotonic() > self._end_s or (self._options.canary and self._outcome.wrong > 0)

    def _kill_some(self, seats: list[Seat]) -> None:
        next_s = time.monotonic() + self._rng.uniform(*BETWEEN_KILLS_S)
        while not self._is_over():
            time.sleep(LOOK_S)
            serving = [seat for seat in seats if seat.serves]
            if time.monotonic() < next_s or len(serving) < SERVING_MIN:
                continue
            victim = self._rng.choice(serving)
            if victim.kill():
                self._outcome.add("kills")
                self._say(f"{victim.name} is killed; {self._outcome.requests} requests, {self._outcome.wrong} wrong")
            next_s = time.monotonic() + self._rng.uniform(*BETWEEN_KILLS_S)
