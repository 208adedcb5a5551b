"""What the two processes of the demo reported, and what it proves.

Owns: the verdict, the table and the closing line of JSON, all pure.
Must not know: processes, engines, terminals.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

NEW_TOKENS_MIN: Final = 16
SPEED_UP_MIN: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What one process reported about the prompt."""

    pid: int
    chunk_tokens: int
    seconds: float
    tokens: tuple[int, ...]
    cached_tokens: int
    computed_tokens: int
    counters: Mapping[str, int]

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> Served:
        """From serve.py's result."""
        values = {name: event[name] for name in cls.__slots__}
        return cls(**{**values, "tokens": tuple(values["tokens"])})

    @property
    def restored_tokens(self) -> int:
        """Tokens whose pages came from the card: loads that were counted, each of one whole chunk."""
        return self.counters["load_objects"] * self.chunk_tokens

    @property
    def lookups(self) -> int:
        """Chunks that the scheduler asked for, whatever the answer."""
        names = ("lookup_hits", "lookup_misses", "lookup_denied", "lookup_no_gateway")
        return sum(self.counters[name] for name in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Both processes' reports, and what follows from them."""

    target: str
    prompt_tokens: int
    cold: Served
    warm: Served

    @property
    def identical(self) -> bool:
        """Whether both gave the same new tokens."""
        return self.cold.tokens == self.warm.tokens

    @property
    def speed_up(self) -> float:
        """How many times faster restoring was than computing."""
        return self.cold.seconds / self.warm.seconds

    @property
    def whole_chunks_tokens(self) -> int:
        """What has to be restored: every whole chunk of the prompt."""
        return self.prompt_tokens // self.cold.chunk_tokens * self.cold.chunk_tokens

    def line(self) -> str:
        """The closing line of JSON."""
        return json.dumps(
            {
                "target": self.target,
                "prompt_tokens": self.prompt_tokens,
                "restored_tokens": self.warm.restored_tokens,
                "identical": self.identical,
                "objects": self.warm.counters["load_objects"],
                "bytes": self.warm.counters["load_bytes"],
            }
        )

    def fault(self) -> str | None:
        """Why the main job was not done, or None."""
        cold, warm = self.cold, self.warm
        asked, wanted, restored = self.prompt_tokens, self.whole_chunks_tokens, warm.restored_tokens
        faults = {
            f"both engines ran in process {cold.pid}": cold.pid == warm.pid,
            f"the answer has {len(cold.tokens)} tokens": len(cold.tokens) < NEW_TOKENS_MIN,
            f"the answers differ: {list(cold.tokens)} cold, {list(warm.tokens)} restored": not self.identical,
            f"the first process computed {cold.computed_tokens} of {asked} prompt tokens: it was not cold": (
                cold.computed_tokens != asked or cold.counters["load_objects"] > 0
            ),
            f"{restored} tokens were restored; every whole chunk is {wanted}": restored != wanted,
            f"{restored} tokens were restored, but vLLM skipped {warm.cached_tokens}": restored != warm.cached_tokens,
            f"{restored} of {asked} tokens were restored, but {warm.computed_tokens} computed": (
                restored + warm.computed_tokens != asked
            ),
            f"restoring was only {self.speed_up:.1f} times as fast as computing": self.speed_up < SPEED_UP_MIN,
        }
        return next((fault for fault, found in faults.items() if found), None)

    def sentences(self) -> list[str]:
        """Who computed what, and where the rest came from."""
        cold, warm = self.cold, self.warm
        own = warm.cached_tokens - warm.restored_tokens
        return [
            f"process {cold.pid} (ended): computed {cold.computed_tokens:,} of {self.prompt_tokens:,} prompt tokens",
            f"process {warm.pid} (new):   computed {warm.computed_tokens:,} of {self.prompt_tokens:,} prompt tokens",
            f"{warm.restored_tokens:,} came from the card, {own:,} from vLLM's own prefix cache (new process: empty)",
        ]

    def rows(self) -> list[tuple[str, str]]:
        """The table."""
        warm = self.warm
        hits, lookups = warm.counters["lookup_hits"], warm.lookups
        rate = f"{hits / lookups:.0%} ({hits} of {lookups} lookups)" if lookups else "no lookups"
        same = f"{len(warm.tokens)} new tokens, {'identical' if self.identical else 'NOT identical'}"
        return [
            ("cold", f"{self.cold.seconds:.2f} s"),
            ("restored", f"{warm.seconds:.2f} s"),
            ("speed-up", f"{self.speed_up:.1f} times"),
            ("answer", same),
            ("tokens restored", f"{warm.restored_tokens:,} of {self.prompt_tokens:,}"),
            ("objects", f"{warm.counters['load_objects']}"),
            ("bytes", f"{warm.counters['load_bytes']:,}"),
            ("hit rate", rate),
        ]
