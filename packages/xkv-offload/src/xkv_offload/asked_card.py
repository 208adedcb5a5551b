"""What the manager asks of its card: one gateway's, or one for each rank.

Owns: the protocol between the manager and its attachments. Must not know: vLLM, how a gateway is reached.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from xkv_store.left_out import LeftOut

from .meter import Totals


class Table(Protocol):
    """The part of the lookup table that is used here."""

    @property
    def lookup(self) -> Callable[[int], tuple[int, int] | None]:
        """Tag to (generation, ranks bitmap), or None."""


NO_DENIALS: Final[tuple[Sequence[tuple[int, int]], Mapping[int, int]]] = ((), {})
"""What `Card.denials` gives, this very object, where there is nothing new."""


class Card(Protocol):
    """What the manager asks of its attachment to the gateway, or to one for each rank.

    See `attachment.SchedulerCard` and `port_per_rank.CardPerRank`. Tags are those of `entries`.
    """

    @property
    def table(self) -> Table:
        """The gateway's current lookup table."""

    def alive(self) -> bool:
        """Connected, with a fresh heartbeat, and all ranks are, too; of several gateways, all."""

    def touch(self, tags: Sequence[int]) -> None:
        """Tell recency, one-way."""

    def denials(self) -> tuple[Sequence[tuple[int, int]], Mapping[int, int]]:
        """New denials (tag, generation); and by gateway where some were lost: nothing is believed up to there."""

    def store_bytes(self) -> int:
        """Bytes of the ring that are on their way to the card, on the rank that has most."""

    def left_out(self, reason: LeftOut, chunks: int) -> None:
        """Tell the gateway, for whoever asks it why they are not there; no message, and no wait."""

    def worker_counts(self) -> Sequence[int]:
        """What all ranks have counted since the last call, in the order of `metrics.WORKER_COUNTERS`."""

    def fragments(self, tag: int) -> int:
        """Fragments of the largest object of which this tag's entry speaks."""

    def loaded(self) -> Sequence[Totals]:
        """What each rank has loaded, and in how much time."""

    def close(self) -> None:
        """Detach."""
