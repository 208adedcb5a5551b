"""One engine's place on the gateway: an engine there, and another whenever it was killed.

Owns: a seat's lives, its batches, and what counts as wrong, stuck, dead or left behind.
Must not know: other seats, who is killed when.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import TYPE_CHECKING, Final

from stand.engines import EngineError, StandError, counted
from stand.gateways import ENGINE_ROLES
from stand.pools import Pool, Stream, is_right

if TYPE_CHECKING:
    from collections.abc import Callable

    from engines.outcome import Outcome
    from stand.engines import Engine, Service
    from stand.gateways import Gateway

OUTPUT_TOKENS: Final = 12
STUCK_S: Final = 60.0  # a batch takes some seconds where four engines share two cores
ANSWER_S_MAX: Final = 150.0  # the engine's process says what is stuck before that
FREED_S_MAX: Final = 10.0  # sessions of an engine that has gone, on a busy machine
PARTNER_S_MAX: Final = 0.5  # of waiting for whoever serves the same model; it may just have been killed


class Model:
    """What the engines of one model are asked: the same at the same time, while all of them are there."""

    def __init__(self, pool: Pool, seats: int, seed: int) -> None:
        self.pool = pool
        self._seed = seed
        self._round = 0
        self._barrier = threading.Barrier(seats, action=self._next)

    def _next(self) -> None:
        self._round += 1

    def meet(self) -> random.Random | None:
        """What draws everybody's next batch; None where somebody does not come, so that each draws his own."""
        try:
            self._barrier.wait(PARTNER_S_MAX)
        except threading.BrokenBarrierError:
            self._barrier.reset()
            return None
        return random.Random(f"{self._seed}/{self._round}")


class Seat:
    """One thread's (`serve`), save `kill`."""

    def __init__(
        self, *, name: str, model: Model, make: Callable[[], Engine], gateway: Gateway, outcome: Outcome, seed: int
    ) -> None:
        self.name = name
        self._model = model
        self._make = make
        self._gateway = gateway
        self._outcome = outcome
        self._stream = Stream(model.pool, random.Random(f"{seed}/{name}"))
        self._lock = threading.Lock()  # of the three below
        self._engine: Engine | None = None
        self._answered = 0  # batches, by this life
        self._was_killed = False

    def start(self) -> None:
        """A new life."""
        engine = self._make()
        with self._lock:
            self._engine, self._answered, self._was_killed = engine, 0, False

    @property
    def serves(self) -> bool:
        """Whether there is an engine that has answered something."""
        with self._lock:
            return self._engine is not None and self._answered > 0 and not self._was_killed

    def kill(self) -> bool:
        """Kill -9, whatever it is doing; whether there was something to kill."""
        with self._lock:
            if self._engine is None or self._was_killed:
                return False
            self._was_killed = True
            os.kill(self._engine.pid, signal.SIGKILL)
            return True

    def serve(self, until: Callable[[], bool]) -> None:
        """Batches, and a new engine whenever one has ended, until the time is over."""
        try:
            while not until():
                if self._engine is None:
                    self.start()
                self._batch()
        except (EngineError, StandError) as error:
            self._outcome.add("engine_deaths")
            self._complain(f"no engine comes up: {error}")
        except Exception as error:  # noqa: BLE001 - else the thread's end would be nobody's
            self._outcome.add("stuck")
            self._complain(f"its thread ended: {error!r}")
        finally:
            self._end()

    def _end(self) -> None:
        with self._lock:
            engine, self._engine = self._engine, None
        if engine is not None:
            engine.stop()

    def _complain(self, what: str) -> None:
        self._outcome.complain(f"{self.name}: {what}")

    def _batch(self) -> None:
        engine = self._engine
        assert engine is not None
        requests, right = self._stream.batch(aborted=False, rng=self._model.meet())
        try:
            engine.begin_serve(requests, max_tokens=OUTPUT_TOKENS, seconds_max=STUCK_S, reset_prefix=True)
            service = engine.finish_serve(ANSWER_S_MAX)
        except (EngineError, StandError, OSError) as error:
            self._bury(engine, error)
            return
        self._judge(service, right)
        with self._lock:
            self._answered += 1

    def _bury(self, engine: Engine, error: Exception) -> None:
        """Note the end of an engine, ours or its own, and see that its sessions end."""
        with self._lock:
            was_killed, self._engine = self._was_killed, None
        engine.kill()
        if not was_killed:
            self._outcome.add("engine_deaths")
            self._complain(f"the engine died: {error}")
        deadline = time.monotonic() + FREED_S_MAX
        while left := [one for one in self._gateway.status()["sessions"] if _is_of(one["role"], one["pid"], engine)]:
            if time.monotonic() > deadline:
                self._outcome.add("leaks")
                self._complain(f"sessions of an engine that has gone: {left}")
                return
            time.sleep(0.02)

    def _judge(self, service: Service, right: dict[str, list[int]]) -> None:
        """Answers are the clean engine's, nothing failed to load, and all came to an end."""
        outcome, product = self._outcome, service.counters.product
        for name, answer in service.answers.items():
            outcome.add("requests")
            if answer.finish_reason is None:
                outcome.add("stuck")
                self._complain(f"{name} did not end; {counted(service)}")
            elif answer.finish_reason == "error" or not is_right(answer, right[name]):
                outcome.add("wrong")
                self._complain(f"{name} got {answer.tokens}, not {right[name]}; {counted(service)}")
        if not service.drained and all(answer.finish_reason for answer in service.answers.values()):
            outcome.add("stuck")
            self._complain(f"transfers did not end; {counted(service)}")
        if product["failed_load_jobs"] and not outcome.options.canary:
            outcome.add("wrong", product["failed_load_jobs"])
            self._complain(f"others' ends made loads fail here; {counted(service)}")
        outcome.restore(self.name, product["load_objects"])


def _is_of(role: str, pid: int, engine: Engine) -> bool:
    return role in ENGINE_ROLES and pid == engine.pid
