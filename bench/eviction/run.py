"""Hit tokens by capacity and policy, for each trace; and bytes written, also with a threshold for stores.

Owns: the command line, the capacities, the tables. Must not know: how a policy works.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from eviction.policies import REFERENCES, Ours, Reference
from eviction.traces import BLOCK_TOKENS, Trace, generated, read
from xkv_offload.asked import AskCounts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from eviction.policies import Policy

CAPACITIES: Final = (0.01, 0.03, 0.1, 0.2, 0.4)  # of a trace's different blocks
OURS: Final = "ours"
TAIL_FIRST: Final = "LRU, tail first"
NAMES: Final = (*REFERENCES, TAIL_FIRST, OURS)
THRESHOLDS: Final = (1, 2)


@dataclass(frozen=True, slots=True)
class Row:
    """One replay. `hits`: of all that a card without a bound would have hit, in tokens; `written`: blocks."""

    trace: str
    capacity: int
    share: float
    policy: str
    threshold: int
    hits: float
    hit_tokens: int
    written: int


def make(name: str, capacity: int) -> Policy:
    """The policy of that name."""
    if name == OURS:
        return Ours(capacity)
    if name == TAIL_FIRST:
        return Reference(REFERENCES["LRU"], capacity, tail_first=True)
    return Reference(REFERENCES[name], capacity, tail_first=False)


def replay(trace: Trace, policy: Policy, threshold: int) -> tuple[int, int]:
    """(hit tokens, blocks written). With a threshold, a block is stored once so many requests have asked for it."""
    counts = AskCounts() if threshold > 1 else None
    hit_tokens = written = 0
    for request in trace.requests:
        blocks = request.blocks
        stored: Sequence[bool] = (True,) * len(blocks)
        if counts is not None:
            stored = [counts.ask(block.to_bytes(8, "little")) >= threshold for block in blocks]
        hit, new = policy.request(blocks, stored)
        hit_tokens += min(hit * BLOCK_TOKENS, request.tokens)
        written += new
    return hit_tokens, written


def rows_of(trace: Trace, *, thresholds: Sequence[int], say: Callable[[str], None]) -> list[Row]:
    """Every policy at every capacity; ours at each threshold, too."""
    most, unique = trace.hit_tokens_max(), trace.unique
    say(f"{trace.name}: {len(trace.requests)} requests, {unique} different blocks, {most} tokens could hit")
    rows = []
    for share in CAPACITIES:
        capacity = max(1, int(share * unique))
        for name in NAMES:
            for threshold in thresholds if name == OURS else (1,):
                policy = make(name, capacity)
                hit_tokens, written = replay(trace, policy, threshold)
                if isinstance(policy, Ours):
                    policy.close()
                hits = round(hit_tokens / most, 4)
                rows.append(Row(trace.name, capacity, share, name, threshold, hits, hit_tokens, written))
        say(
            f"  {capacity} blocks: " + ", ".join(f"{row.policy} {row.hits}" for row in rows if row.capacity == capacity)
        )
    return rows


def table(rows: Sequence[Row]) -> str:
    """Markdown: hits of all that could hit, a line for each trace and capacity."""
    lines = [f"| trace | capacity | {' | '.join(NAMES)} |", "| --- " * (2 + len(NAMES)) + "|"]
    for (trace, capacity), found in _by_capacity(rows):
        cells = [f"{row.hits:.3f}" for row in found if row.threshold == 1]
        lines.append(f"| {trace} | {capacity:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def threshold_table(rows: Sequence[Row]) -> str:
    """Markdown: ours, by threshold: hits, and writes beside those without one."""
    heads = [f"hits, {one} | written, {one}" for one in THRESHOLDS]
    lines = [f"| trace | capacity | {' | '.join(heads)} |", "| --- " * (2 + 2 * len(THRESHOLDS)) + "|"]
    for (trace, capacity), found in _by_capacity(rows):
        ours = [row for row in found if row.policy == OURS]
        cells = [f"{row.hits:.3f} | {row.written / max(1, ours[0].written):.2f}" for row in ours]
        lines.append(f"| {trace} | {capacity:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def behind(rows: Sequence[Row]) -> list[str]:
    """Where ours is not at least as good as the best of the others."""
    found = []
    for (trace, capacity), of_both in _by_capacity(rows):
        plain = [row for row in of_both if row.threshold == 1]
        ours = next(row for row in plain if row.policy == OURS)
        best = max((row for row in plain if row.policy != OURS), key=lambda row: row.hit_tokens)
        if ours.hit_tokens < best.hit_tokens:
            share = 1 - ours.hit_tokens / best.hit_tokens
            found.append(f"{trace}, {capacity} blocks: {share:.2%} fewer hit tokens than {best.policy}")
    return found


def _by_capacity(rows: Sequence[Row]) -> list[tuple[tuple[str, int], list[Row]]]:
    grouped: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        grouped.setdefault((row.trace, row.capacity), []).append(row)
    return list(grouped.items())


def main(arguments: list[str]) -> int:
    """Replay all; the last line is one JSON object."""
    parser = argparse.ArgumentParser(prog="bench/eviction", allow_abbrev=False)
    parser.add_argument("--traces", type=Path, help="a folder of *.jsonl: hash_ids and input_length in each line")
    parser.add_argument("--no-generated", action="store_true", help="those of the folder alone")
    parser.add_argument("--no-thresholds", action="store_true", help="without xkv.store_threshold")
    parser.add_argument("--json", action="store_true", help="print the last line alone")
    options = parser.parse_args(arguments)
    say = partial(print, file=sys.stderr, flush=True)
    found = [] if options.traces is None else read(options.traces)
    if options.traces is not None and not found:
        parser.error(f"no *.jsonl in {options.traces}")
    rows: list[Row] = []
    for trace in [*found, *([] if options.no_generated else generated())]:
        thresholds = THRESHOLDS[:1] if options.no_thresholds else THRESHOLDS
        rows += rows_of(trace, thresholds=thresholds, say=(lambda _: None) if options.json else say)
    if not options.json:
        print(table(rows), "", threshold_table(rows), "", *behind(rows), sep="\n")
    print(json.dumps({"rows": [asdict(row) for row in rows], "behind": behind(rows)}))
    return 0
