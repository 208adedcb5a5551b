"""Block-hash traces: read from files, or generated; which requests ask for which blocks, in which order.

Owns: the format of trace files, and three generators. Must not know: policies, capacities.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BLOCK_TOKENS: Final = 512
SEED: Final = 7


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt: an id for each block (equal ids mean equal prefixes), and how many tokens that is."""

    blocks: tuple[int, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival."""

    name: str
    requests: tuple[Request, ...]

    @property
    def unique(self) -> int:
        """Different blocks."""
        return len({block for request in self.requests for block in request.blocks})

    def hit_tokens_max(self) -> int:
        """What a card without a bound would hit."""
        seen: set[int] = set()
        tokens = 0
        for request in self.requests:
            hit = sum(1 for _ in itertools.takewhile(seen.__contains__, request.blocks))
            tokens += min(hit * BLOCK_TOKENS, request.tokens)
            seen.update(request.blocks)
        return tokens


def read(folder: Path) -> list[Trace]:
    """Every *.jsonl of a folder: one request a line, with `hash_ids` and `input_length`."""
    return [_read(path) for path in sorted(folder.glob("*.jsonl"))]


def _read(path: Path) -> Trace:
    requests = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        requests.append(Request(tuple(row["hash_ids"]), int(row["input_length"])))
    return Trace(path.stem, tuple(requests))


class _Blocks:
    """Gives new blocks."""

    def __init__(self, first: int = 0) -> None:
        self._next = itertools.count(first)

    def take(self, count: int) -> tuple[int, ...]:
        return tuple(itertools.islice(self._next, count))


def _request(blocks: tuple[int, ...]) -> Request:
    return Request(blocks, len(blocks) * BLOCK_TOKENS)


def chats(requests: int = 12_000) -> Trace:
    """Chats of several turns: each asks for all before it and some more, after a pause; half end at each turn."""
    draw, blocks = random.Random(SEED), _Blocks()
    waiting: list[deque[tuple[int, ...]]] = [deque() for _ in range(4_096)]  # by the time of their next turn
    made: list[Request] = []
    for now in itertools.count():
        due = waiting[now % len(waiting)]
        starting = [blocks.take(draw.randint(1, 12)) for _ in range(1 if draw.random() < 0.5 else 0)]
        for prefix in [*due, *starting]:
            prompt = prefix + blocks.take(draw.randint(1, 6))
            made.append(_request(prompt))
            if draw.random() < 0.6 and len(prompt) < 200:
                pause = min(len(waiting) - 1, 1 + int(draw.lognormvariate(5.0, 1.2)))
                waiting[(now + pause) % len(waiting)].append(prompt)
        due.clear()
        if len(made) >= requests:
            return Trace("generated: chats", tuple(made[:requests]))
    raise AssertionError


def agents(requests: int = 12_000) -> Trace:
    """Agents of 40 kinds, some asked for far more often: a long shared prompt, and a few steps of a task of its own."""
    draw, blocks = random.Random(SEED + 1), _Blocks()
    prompts = [blocks.take(draw.randint(8, 64)) for _ in range(40)]
    weights = [1 / (rank + 1) for rank in range(len(prompts))]
    at_work: list[tuple[int, ...]] = []
    made: list[Request] = []
    while len(made) < requests:
        if len(at_work) < 96:
            (prompt,) = draw.choices(prompts, weights)
            at_work.append(prompt + blocks.take(draw.randint(1, 4)))
        place = draw.randrange(len(at_work))
        made.append(_request(at_work[place]))
        if draw.random() < 0.25:
            del at_work[place]
        else:
            at_work[place] += blocks.take(draw.randint(1, 3))
    return Trace("generated: agents", tuple(made))


def documents(requests: int = 6_000) -> Trace:
    """Chats as above beside long documents of which nine in ten are read once, the others asked about again."""
    draw, blocks = random.Random(SEED + 2), _Blocks(1 << 32)  # none of a chat's
    made: list[Request] = []
    again: list[tuple[int, tuple[int, ...]]] = []
    for number, chat in enumerate(chats(requests).requests):
        made.append(chat)
        if draw.random() < 0.15:
            document = blocks.take(draw.randint(100, 400))
            made.append(_request(document))
            if draw.random() < 0.1:
                again += [(number + draw.randint(20, 400), document) for _ in range(draw.randint(1, 4))]
        for entry in [entry for entry in again if entry[0] <= number]:
            again.remove(entry)
            made.append(_request(entry[1] + blocks.take(1)))
    return Trace("generated: chats and documents", tuple(made))


def generated() -> Iterator[Trace]:
    """All of them."""
    yield chats()
    yield agents()
    yield documents()
