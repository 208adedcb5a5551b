"""Real engines of two ranks: made, ended, and one rank killed.

Owns: what must be true of such an engine's processes, from its start to its end.
Must not know: what is asked of it, or what a right answer is.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from stand.engines import STOP_S_MAX, EngineError, alive, await_end

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stand.cases import Stand
    from stand.engines import Engine, EngineConfig

RANKS = 2
PARALLEL = {"tensor_parallel_size": RANKS}
ERROR_S_MAX = 30.0  # vLLM lets the other ranks end by themselves for five seconds, and four after a signal
FREED_S_MAX = 1.0  # the promise


@contextmanager
def two_ranks(stand: Stand, config: EngineConfig) -> Iterator[Engine]:
    """A ready engine. Its ranks must end with it."""
    started = time.monotonic()
    with stand.engine(config) as engine:
        print(f"two ranks ready in {time.monotonic() - started:.0f} s")
        ranks = engine.description["ranks"]
        assert len({engine.pid, *ranks}) == 1 + RANKS, "each rank is a process of its own"
        assert all(map(alive, ranks))
        yield engine
    for pid in ranks:
        await_end(pid, STOP_S_MAX)


def kill_rank(engine: Engine, rank: int) -> EngineError:
    """Kill -9 one rank of an engine that has been asked something; the error with which the engine answers.

    vLLM ends the other ranks. The engine's own process lives on, and is killed here: its orderly end waits for ever
    for the dead rank to take what it was sent (ZeroMQ's, in vLLM's `shutdown`).
    """
    ranks = engine.description["ranks"]
    os.kill(ranks[rank], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(EngineError) as failure:
        engine.finish_generate()
    seconds = time.monotonic() - began
    print(f"a rank's end was the engine's error after {seconds:.1f} s: {failure.value}")
    assert seconds < ERROR_S_MAX
    assert "died unexpectedly" in engine.log.read_text(errors="replace"), "vLLM says which process it was"
    for pid in ranks:
        await_end(pid, STOP_S_MAX)
    assert alive(engine.pid)
    engine.kill()
    return failure.value
