"""How a failed load reaches vLLM.

Owns: the choice of the channel by detected features, the log of failed loads between worker and connector, and the
methods that vLLM's connector has for it (put on its class by `attach`, or of a subclass, `connector`).
Must not know: keys, slots, the gateway, how loads fail.
"""

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Channel = Literal["request_errors", "block_errors", "verified"]

BLOCKS_METHOD = "get_block_ids_with_load_errors"
REQUESTS_METHOD = "get_transfer_results"


class LoadFailedError(RuntimeError):
    """A load failed that cannot fail: ends the engine rather than serve wrong pages."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The channel, and why none is better (for messages and the doctor)."""

    channel: Channel
    reason: str


def choose(*, features: Mapping[str, bool], full_attention: tuple[bool, ...], world_size: int) -> Plan:
    """The channel for an engine with these groups (position → is it full attention) on this vLLM.

    Request errors serve every engine; else `by_blocks`.
    """
    if features["request_error_reporting"]:
        return Plan("request_errors", "")
    return by_blocks(features=features, full_attention=full_attention, world_size=world_size)


def by_blocks(*, features: Mapping[str, bool], full_attention: tuple[bool, ...], world_size: int) -> Plan:
    """Block errors where the engine survives them: one full-attention group, one rank or an abort that is safe.

    Elsewhere hits are verified before they are given, so that no load can fail (ADR 0007).
    """
    if not features["block_error_reporting"]:
        return Plan("verified", "this vLLM does not collect load errors from its connector")
    if len(full_attention) != 1:
        return Plan(
            "verified",
            f"this vLLM survives block-level load errors with one KV-cache group, not {len(full_attention)}",
        )
    if not full_attention[0]:
        return Plan(
            "verified",
            "recomputing after block-level load errors is unsound for a group that is not full attention",
        )
    if world_size > 1 and not features["abort_safe"]:
        return Plan("verified", "with several ranks this vLLM does not survive the abort that follows a load error")
    return Plan("block_errors", "")


class FailureLog:
    """Failed loads that vLLM has not been told of: their destination blocks, or their requests. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: set[int] = set()
        self._requests: set[str] = set()

    def add(self, blocks: Collection[int]) -> None:
        """Note the blocks of a load that is being reported in this step."""
        with self._lock:
            self._blocks.update(blocks)

    def add_request(self, req_id: str) -> None:
        """Note the request of a load that is being reported in this step."""
        with self._lock:
            self._requests.add(req_id)

    def take(self) -> set[int]:
        """All blocks since the last call."""
        with self._lock:
            taken, self._blocks = self._blocks, set()
            return taken

    def take_requests(self) -> set[str]:
        """All requests since the last call."""
        with self._lock:
            taken, self._requests = self._requests, set()
            return taken


LogOf = Callable[[Any], FailureLog | None]
Method = Callable[..., Any]


def methods(before: Mapping[str, Method], log_of: LogOf) -> dict[str, Method]:
    """Ours for each of the connector's methods in `before`: they add our failures to what those answer.

    `log_of(connector)` is None for a connector of another spec: then the method does what it did.
    """

    def get_block_ids_with_load_errors(self: Any) -> set[int]:
        blocks: set[int] = set(before[BLOCKS_METHOD](self))
        log = log_of(self)
        return blocks | log.take() if log is not None else blocks

    def get_transfer_results(self: Any, finished_req_ids: set[str]) -> Any:
        results = before[REQUESTS_METHOD](self, finished_req_ids)
        log = log_of(self)
        failed = log.take_requests() & results.finished_recving if log is not None else set()
        return replace(results, failed_recving=results.failed_recving | failed) if failed else results

    ours: dict[str, Method] = {BLOCKS_METHOD: get_block_ids_with_load_errors, REQUESTS_METHOD: get_transfer_results}
    return {name: ours[name] for name in before}


def attach(connector_class: Any, names: Collection[str], log_of: LogOf) -> None:
    """Put our methods on `connector_class`, whose bases have those called `names`.

    Idempotent. What the class defines itself is left alone.
    """
    missing = [name for name in names if name not in vars(connector_class)]
    for name, method in methods({name: getattr(connector_class, name) for name in missing}, log_of).items():
        setattr(connector_class, name, method)


def method_names(features: Mapping[str, bool]) -> tuple[str, ...]:
    """The connector's methods that this vLLM asks for failed loads."""
    asked = {BLOCKS_METHOD: "block_error_reporting", REQUESTS_METHOD: "request_error_reporting"}
    return tuple(name for name, feature in asked.items() if features[feature])
