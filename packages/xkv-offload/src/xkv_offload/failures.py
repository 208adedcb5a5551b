"""How a failed load reaches vLLM.

Owns: the choice of the channel by detected features, the log of failed blocks between worker and connector, and the
method that is put on vLLM's connector for it.
Must not know: keys, slots, the gateway, how loads fail.
"""

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Channel = Literal["block_errors", "none"]

GRAFT_MARK = "_xkv_graft"


class LoadFailedError(RuntimeError):
    """A load failed where vLLM has no way to hear of it: ends the engine rather than serve wrong pages."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The channel, and why there is no other (for the error and the doctor)."""

    channel: Channel
    reason: str


def choose(*, features: Mapping[str, bool], full_attention: tuple[bool, ...], world_size: int) -> Plan:
    """The channel for an engine with these groups (position → is it full attention) on this vLLM.

    Block errors are survivable for one full-attention group, with one rank or where aborts are safe; anything else
    has none here yet.
    """
    if not features["block_error_reporting"]:
        return Plan("none", "this vLLM does not collect load errors from its connector")
    if len(full_attention) != 1:
        return Plan(
            "none",
            f"this vLLM survives block-level load errors with one KV-cache group, not {len(full_attention)}",
        )
    if not full_attention[0]:
        return Plan(
            "none",
            "recomputing after block-level load errors is unsound for a group that is not full attention",
        )
    if world_size > 1 and not features["abort_safe"]:
        return Plan("none", "with several ranks this vLLM does not survive the abort that follows a load error")
    return Plan("block_errors", "")


class FailureLog:
    """Destination blocks of failed loads that vLLM has not been told of. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: set[int] = set()

    def add(self, blocks: Collection[int]) -> None:
        """Note the blocks of a load that is being reported in this step."""
        with self._lock:
            self._blocks.update(blocks)

    def take(self) -> set[int]:
        """All blocks since the last call."""
        with self._lock:
            taken, self._blocks = self._blocks, set()
            return taken


def attach(connector_class: Any, log_of: Callable[[Any], FailureLog | None]) -> None:
    """Give `connector_class` a `get_block_ids_with_load_errors` that adds ours to what was there.

    Idempotent. `log_of(connector)` is None for a connector of another spec: then the method does what it did. A class
    that defines the method itself is left alone.
    """
    name = "get_block_ids_with_load_errors"
    if name in vars(connector_class):
        return
    before = getattr(connector_class, name)

    def get_block_ids_with_load_errors(self: Any) -> set[int]:
        blocks: set[int] = set(before(self))
        log = log_of(self)
        return blocks | log.take() if log is not None else blocks

    setattr(connector_class, name, get_block_ids_with_load_errors)
