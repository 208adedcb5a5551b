"""An engine that schedules ahead of its results, as vLLM's core does with a queue of batches.

Owns: the queue, and when the ranks execute a step that is in it: at once, or only when its result is wanted.
Must not know: what a page holds, which release this is.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.engine import Engine, Step

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from harness import release
    from harness.shapes import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """How far and how an engine goes ahead.

    `depth`: steps that are scheduled and not yet heard of. `late`: ranks begin a step when its result is wanted, so
    that the next one is scheduled before, else at once.
    """

    depth: int = 2
    late: bool = False


WAYS: Mapping[str, Mapping[str, Any]] = {
    # vLLM's own scheduler for this, which counts on tokens that it does not know yet
    "async, begun at once": {"async_scheduling": True, "pipeline": Pipeline()},
    "async, begun late": {"async_scheduling": True, "pipeline": Pipeline(late=True)},
    # the plain scheduler with a queue of batches, as pipeline stages have it
    "queue of two, begun late": {"pipeline": Pipeline(late=True)},
}
"""Options of a launch for each way of going ahead."""


class PipelinedEngine(Engine):
    """`step` schedules one step, and hears of the oldest once `depth` are under way or nothing is left to do."""

    def __init__(self, shape: Shape, launch: release.Launch, pipeline: Pipeline) -> None:
        super().__init__(shape, launch)
        self._pipeline = pipeline
        self._queue: deque[tuple[Step, Any]] = deque()

    def step(self, *, before_execute: Callable[[Step], None] | None = None) -> Step:
        """One turn of the core. What is executed late has its `before_execute` at once all the same."""
        step = None
        if self.scheduler.has_requests():
            step = self.schedule()
            if before_execute is not None:
                before_execute(step)
            self._queue.append((step, None if self._pipeline.late else self.execute(step)))
            if len(self._queue) < self._pipeline.depth:
                return step
        assert self._queue, "a turn without anything to do"
        oldest, output = self._queue.popleft()
        self.update(oldest, output if output is not None else self.execute(oldest))
        return step or oldest

    @property
    def under_way(self) -> int:
        """Steps that are scheduled and not yet heard of."""
        return len(self._queue)

    def is_idle(self) -> bool:
        """As the core asks: its queue is empty, too."""
        return not self._queue and super().is_idle()
