"""The pool of prompts with shared prefixes, and the stream of requests made of it.

Owns: which prompts there are, which of them are fit to be compared, and what comes when.
Must not know: engines, faults.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from stand.engines import Request
from stand.models import prompt

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Sequence

    from stand.models import Shape

ROOT_TOKENS: Final = 512
BRANCH_TOKENS: Final = 256
LEAF_TOKENS: Final = (90, 250)  # from, to
BRANCHES_OF_ROOT: Final = 3
LEAVES_OF_BRANCH: Final = 3
REQUESTS_MAX: Final = 3  # of one batch
ABORT_STEP_MAX: Final = 40  # a batch takes some dozen steps that compute, and others that wait

# In natural logarithms of probability. Sums of float32 in another order differ by some 1e-5 here.
MARGIN_MIN: Final = 0.002


def candidates(shape: Shape, rng: random.Random) -> Iterator[list[int]]:
    """Prompts without end: root by root, each with its branches and leaves."""
    seed = 1_000
    while True:
        root = prompt(shape, tokens=ROOT_TOKENS, seed=seed)
        for branch in range(BRANCHES_OF_ROOT):
            trunk = root + prompt(shape, tokens=BRANCH_TOKENS, seed=seed + 10 * (branch + 1))
            for leaf in range(LEAVES_OF_BRANCH):
                tokens = rng.randint(*LEAF_TOKENS)
                yield trunk + prompt(shape, tokens=tokens, seed=seed + 10 * (branch + 1) + leaf + 1)
        seed += 1_000


@dataclass(frozen=True, slots=True)
class Pool:
    """Prompts and what an engine without offloading answers to each."""

    prompts: Sequence[list[int]]
    answers: Sequence[list[int]]


class Stream:
    """Batches of requests over a pool."""

    def __init__(self, pool: Pool, rng: random.Random) -> None:
        self._pool = pool
        self._rng = rng
        self._count = 0

    def batch(self, *, aborted: bool) -> tuple[list[Request], dict[str, list[int]]]:
        """The next requests, with the right answer of each by its id; `aborted`: some of them are."""
        rng = self._rng
        requests: list[Request] = []
        right: dict[str, list[int]] = {}
        for position in range(rng.randint(1, REQUESTS_MAX)):
            self._count += 1
            name = f"r{self._count}"
            number = rng.randrange(len(self._pool.prompts))
            aborts = aborted and (position == 0 or rng.random() < 0.5)
            at_step = 0 if position == 0 else rng.randint(0, 6)
            request = Request(
                id=name,
                prompt=self._pool.prompts[number],
                at_step=at_step,
                abort_step=at_step + rng.randint(1, ABORT_STEP_MAX) if aborts else None,
            )
            requests.append(request)
            right[name] = self._pool.answers[number]
        return requests, right
