"""What the manager tells the workers about one job.

Owns: `XkvTransferSpec`, the load/store spec that travels inside vLLM's scheduler output (pickled between processes,
the same object where there is one process).
Must not know: vLLM (it needs no class of it), slots, the gateway.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StagedObject:
    """An object that lies verified in the ring: one slot per fragment, from the first one on; `length` in bytes."""

    generation: int
    length: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class XkvTransferSpec:
    """The chunks of one load or store job.

    `namespace`: 16 bytes, the manager's at the time the job was made, so that a late store after a reset lands in
    the old one. `keys`: vLLM's offload keys, group-major, in the order of the job's blocks. For stores, `family` is
    the arrival of the request (µs since 1970), `positions` the chunks' places in it (order of eviction), and
    `replace` says which of them must not be taken for held. `req_id` is the request that a load is for. `staged`:
    where a load's objects lie already, by key and object rank; nothing for those that the workers read themselves.
    """

    namespace: bytes
    keys: tuple[bytes, ...]
    req_id: str
    family: int = 0
    positions: tuple[int, ...] = ()
    replace: tuple[bool, ...] = ()
    staged: tuple[tuple[StagedObject, ...], ...] = ()

    @staticmethod
    def medium() -> str:
        """The name that releases with handlers route by."""
        return "XKV"
