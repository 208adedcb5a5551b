"""Block-hash traces: read from files, or generated; which requests ask for which blocks, in which order.

Owns: the format of trace files, and three generators, each with two loads. Must not know: policies, capacities.
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


@dataclass(frozen=True, slots=True)
class Chats:
    """A load of chats; times are in steps of the clock, lengths in blocks."""

    start_share: float = 0.5  # of steps in which a chat starts
    first_max: int = 12  # of what a chat begins with
    turn_max: int = 6
    goes_on_share: float = 0.6  # of turns that have another one after them
    pause_mu: float = 5.0  # of the logarithm of a pause
    pause_sigma: float = 1.2


@dataclass(frozen=True, slots=True)
class Agents:
    """A load of agents; lengths in blocks."""

    kinds: int = 40
    prompt_min: int = 8
    prompt_max: int = 64
    skew: float = 1.0  # a kind's share is that of its rank to minus this power
    at_work: int = 96
    ends_share: float = 0.25  # of steps that are a task's last


@dataclass(frozen=True, slots=True)
class Documents:
    """A load of documents beside chats; lengths in blocks, times in requests of chats."""

    share: float = 0.15  # of chats' requests that have a document after them
    length_min: int = 100
    length_max: int = 400
    again_share: float = 0.1  # of documents that are asked about again
    again_later_max: int = 400


def chats(name: str = "chats", requests: int = 12_000, seed: int = SEED, load: Chats = Chats()) -> Trace:
    """Chats of several turns: each asks for all before it and some more, after a pause; many end at each turn."""
    draw, blocks = random.Random(seed), _Blocks()
    waiting: list[deque[tuple[int, ...]]] = [deque() for _ in range(4_096)]  # by the time of their next turn
    made: list[Request] = []
    for now in itertools.count():
        due = waiting[now % len(waiting)]
        starting = [
            blocks.take(draw.randint(1, load.first_max)) for _ in range(1 if draw.random() < load.start_share else 0)
        ]
        for prefix in [*due, *starting]:
            prompt = prefix + blocks.take(draw.randint(1, load.turn_max))
            made.append(_request(prompt))
            if draw.random() < load.goes_on_share and len(prompt) < 200:
                pause = min(len(waiting) - 1, 1 + int(draw.lognormvariate(load.pause_mu, load.pause_sigma)))
                waiting[(now + pause) % len(waiting)].append(prompt)
        due.clear()
        if len(made) >= requests:
            return Trace(f"generated: {name}", tuple(made[:requests]))
    raise AssertionError


def agents(name: str = "agents", requests: int = 12_000, seed: int = SEED + 1, load: Agents = Agents()) -> Trace:
    """Agents of many kinds, some asked for far more often: a long shared prompt, and steps of a task of its own."""
    draw, blocks = random.Random(seed), _Blocks()
    prompts = [blocks.take(draw.randint(load.prompt_min, load.prompt_max)) for _ in range(load.kinds)]
    weights = [(rank + 1) ** -load.skew for rank in range(len(prompts))]
    at_work: list[tuple[int, ...]] = []
    made: list[Request] = []
    while len(made) < requests:
        if len(at_work) < load.at_work:
            (prompt,) = draw.choices(prompts, weights)
            at_work.append(prompt + blocks.take(draw.randint(1, 4)))
        place = draw.randrange(len(at_work))
        made.append(_request(at_work[place]))
        if draw.random() < load.ends_share:
            del at_work[place]
        else:
            at_work[place] += blocks.take(draw.randint(1, 3))
    return Trace(f"generated: {name}", tuple(made))


def documents(
    beside: Trace,
    name: str = "chats and documents",
    seed: int = SEED + 2,
    load: Documents = Documents(),
) -> Trace:
    """Chats beside long documents of which most are read once, the others asked about again."""
    draw, blocks = random.Random(seed), _Blocks(1 << 32)  # none of a chat's
    made: list[Request] = []
    again: list[tuple[int, tuple[int, ...]]] = []
    for number, chat in enumerate(beside.requests):
        made.append(chat)
        if draw.random() < load.share:
            document = blocks.take(draw.randint(load.length_min, load.length_max))
            made.append(_request(document))
            if draw.random() < load.again_share:
                again += [
                    (number + draw.randint(20, load.again_later_max), document) for _ in range(draw.randint(1, 4))
                ]
        for entry in [entry for entry in again if entry[0] <= number]:
            again.remove(entry)
            made.append(_request(entry[1] + blocks.take(1)))
    return Trace(f"generated: {name}", tuple(made))


def changing(*parts: Trace) -> Trace:
    """One load after the other, with nothing in common."""
    made: list[Request] = []
    for number, part in enumerate(parts):
        made += [Request(tuple(number << 40 | block for block in one.blocks), one.tokens) for one in part.requests]
    return Trace("generated: a load that changes", tuple(made))


def generated() -> Iterator[Trace]:
    """What the policy's numbers were chosen by, with files' traces; then what they were not."""
    yield chats()
    yield agents()
    yield documents(chats(requests=6_000))
    yield from held_out()


def held_out() -> Iterator[Trace]:
    """Other seeds and other loads of the same makers: nothing in the policy was chosen by what these say."""
    quick = Chats(start_share=0.8, first_max=30, turn_max=4, goes_on_share=0.75, pause_mu=3.5, pause_sigma=1.6)
    few = Agents(kinds=12, prompt_min=4, prompt_max=40, skew=0.6, at_work=48, ends_share=0.1)
    many = Agents(kinds=150, prompt_min=8, prompt_max=64, skew=1.2, at_work=160, ends_share=0.4)
    asked = Documents(share=0.08, length_min=30, length_max=600, again_share=0.3, again_later_max=1_500)
    yield chats("quick chats", seed=101, load=quick)
    yield agents("few agents", seed=102, load=few)
    yield agents("many agents", seed=103, load=many)
    yield documents(chats(requests=6_000, seed=104), "chats and documents asked about", seed=105, load=asked)
    yield changing(
        agents(requests=5_000, seed=106, load=many),
        chats(requests=5_000, seed=107),
        agents(requests=5_000, seed=108),
    )
