"""Prompts whose answers no order of additions can turn, and streams of requests made of them.

Owns: which prompts there are, which of them are fit to be compared, what the right answer is, and what comes when.
Must not know: offloading, gateways, faults.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count, islice
from typing import TYPE_CHECKING, Final

from stand.engines import Request
from stand.models import prompt

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Sequence

    from stand.engines import Answer, Engine
    from stand.models import Shape

ROOT_TOKENS: Final = 512
BRANCH_TOKENS: Final = 256
LEAF_TOKENS: Final = (90, 250)  # from, to
BRANCHES_OF_ROOT: Final = 3
LEAVES_OF_BRANCH: Final = 3
REQUESTS_MAX: Final = 3  # of one batch
ABORT_STEP_MAX: Final = 40  # a batch takes some dozen steps that compute, and others that wait
ASKED_AT_ONCE: Final = 8
LEFT_OUT_MAX: Final = 10  # for each prompt that is wanted: a model that decides less needs another scale

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
    """Prompts and what an engine without offloading answers to each. `left_out`: so many were not fit."""

    prompts: list[list[int]]
    answers: list[list[int]]
    left_out: int

    @classmethod
    def ask(cls, engine: Engine, coming: Iterator[list[int]], *, wanted: int, output_tokens: int) -> Pool:
        """The first prompts whose answers nothing but other pages can turn, by an engine without offloading."""
        prompts: list[list[int]] = []
        answers: list[list[int]] = []
        left_out = 0
        numbers = count(1)
        while len(prompts) < wanted:
            some = islice(coming, min(ASKED_AT_ONCE, wanted - len(prompts)))
            asked = [Request(id=f"p{next(numbers)}", prompt=prompt) for prompt in some]
            engine.begin_serve(asked, max_tokens=output_tokens, margins=True)
            found = engine.finish_serve().answers
            for request in asked:
                answer = found[request.id]
                assert answer.margin is not None
                if answer.margin < MARGIN_MIN or len(set(answer.tokens)) < output_tokens // 4:
                    left_out += 1
                    continue
                prompts.append(request.prompt)
                answers.append(answer.tokens)
            assert left_out <= LEFT_OUT_MAX * wanted, "the model decides nothing: it needs another scale"
        return cls(prompts, answers, left_out)


def is_right(answer: Answer, right: Sequence[int]) -> bool:
    """Whether the tokens are the right ones; of an answer that was cut off, as far as it goes."""
    if answer.finish_reason == "length":
        return answer.tokens == right
    return answer.tokens == right[: len(answer.tokens)]


class Stream:
    """Batches of requests over a pool."""

    def __init__(self, pool: Pool, rng: random.Random) -> None:
        self._pool = pool
        self._rng = rng
        self._count = 0

    def batch(self, *, aborted: bool, rng: random.Random | None = None) -> tuple[list[Request], dict[str, list[int]]]:
        """The next requests, with the right answer of each by its id; `aborted`: some of them are.

        `rng`: draws this batch, so that others' streams can have the same.
        """
        rng = rng or self._rng
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
