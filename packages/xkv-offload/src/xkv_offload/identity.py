"""What makes stored bytes valid, as one namespace.

Owns: the identity of an engine's objects: the facts that every rank publishes, their comparison, and the namespace
that the scheduler adopts from them.
Must not know: how facts are found in vLLM (compat hands them over), sockets, keys.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xkv_store.errors import UserError
from xkv_store.geometry import NAMESPACE_BYTES

IDENTITY_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Descriptor:
    """What one rank publishes.

    `facts`: everything that must be equal on all ranks and that makes bytes valid. `weights`: rank 0's fingerprint,
    None where it is not rank 0 or could not be determined. `undetermined`: names of facts that this rank could not
    determine; any makes the namespace this launch's own. `engine`: what the scheduler must know beside (not part of
    the namespace), such as the bytes of each group's chunk.
    """

    rank: int
    facts: Mapping[str, object]
    weights: str | None
    undetermined: tuple[str, ...]
    engine: Mapping[str, object]

    def text(self) -> str:
        """As JSON, sorted."""
        return canonical(
            {
                "rank": self.rank,
                "facts": self.facts,
                "weights": self.weights,
                "undetermined": list(self.undetermined),
                "engine": self.engine,
            }
        )

    @classmethod
    def from_text(cls, text: str) -> "Descriptor":
        """Back from JSON. Raises UserError if another release of xkv wrote something else."""
        try:
            fields = json.loads(text)
            return cls(
                int(fields["rank"]),
                dict(fields["facts"]),
                fields["weights"],
                tuple(fields["undetermined"]),
                dict(fields["engine"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"a rank published an identity that cannot be read ({error}): are all workers of one installation?"
            ) from error

    def digest(self) -> bytes:
        """Of the facts alone: 16 bytes."""
        return digest({"format": IDENTITY_FORMAT, "facts": self.facts})


@dataclass(frozen=True, slots=True)
class Identity:
    """The adopted namespace: 16 bytes, its full text, and why it is this launch's own (empty: it is not)."""

    namespace: bytes
    text: str
    own_because: tuple[str, ...]


def canonical(value: object) -> str:
    """JSON with sorted keys and no spaces: equal values give equal texts."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str)


def digest(value: object) -> bytes:
    """sha256 of the canonical text, cut to the length of a namespace."""
    return hashlib.sha256(canonical(value).encode()).digest()[:NAMESPACE_BYTES]


def adopt(
    *,
    descriptors: Sequence[Descriptor],
    world_size: int,
    engine_id: str,
    salt: str,
    own_because: Sequence[str],
) -> Identity:
    """The namespace that all ranks agree on.

    Raises UserError that names the ranks that are missing, or the first rank and fact that differs from rank 0.
    `own_because` are reasons of the scheduler's own for a namespace of this launch alone.
    """
    by_rank = {descriptor.rank: descriptor for descriptor in descriptors}
    missing = [rank for rank in range(world_size) if rank not in by_rank]
    if missing:
        raise UserError(
            f"no identity from rank {', '.join(map(str, missing))} of {world_size}: did its worker start? "
            "(engines over several nodes are not supported)"
        )
    first = by_rank[0]
    for rank in range(1, world_size):
        other = by_rank[rank]
        if other.digest() != first.digest():
            names = sorted(
                name
                for name in first.facts.keys() | other.facts.keys()
                if canonical(first.facts.get(name)) != canonical(other.facts.get(name))
            )
            raise UserError(
                f"rank {rank} disagrees with rank 0 about {', '.join(names)}: {rank} says "
                f"{canonical(other.facts.get(names[0]))[:200]}, 0 says "
                f"{canonical(first.facts.get(names[0]))[:200]}"
            )
    reasons = list(own_because)
    for descriptor in by_rank.values():
        reasons += [f"{name} could not be determined" for name in descriptor.undetermined]
    if first.weights is None:
        reasons.append("the weights could not be fingerprinted (set xkv.weights_fingerprint)")
    whole = {
        "format": IDENTITY_FORMAT,
        "facts": first.facts,
        "weights": first.weights,
        "salt": salt,
        "launch": engine_id if reasons else "",
    }
    return Identity(digest(whole), canonical(whole), tuple(dict.fromkeys(reasons)))


def after_reset(namespace: bytes, nonce: bytes) -> bytes:
    """The namespace that an engine moves to when its cache is reset."""
    return hashlib.sha256(namespace + nonce).digest()[:NAMESPACE_BYTES]
