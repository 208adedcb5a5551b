"""Why lookups miss, asked of one card: its objects, its records, and what was published of its namespaces.

Owns: the order of the questions: the object itself, the same block under other namespaces, the identities.
Must not know: options, what is printed, how hashes or identities come about.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from . import identities
from .errors import UserError
from .explanation import Explanation, Verdict, explain, held_elsewhere, other_identity
from .geometry import NAMESPACE_BYTES
from .key import ObjectKey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .card_view import CardView
    from .identities import Difference

NEIGHBOURS_TOLD_MAX: Final = 3  # other namespaces that an answer compares with
PROBED_MAX: Final = 1_024  # namespaces in which the same block is looked for: more does a card not keep
NAMED_MAX: Final = 3


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another namespace: how it differs, and whether it holds the same block."""

    namespace: bytes
    found: Sequence[Difference]
    holds: bool


class Inquiry:
    """One card in view, with its namespaces as they are now."""

    def __init__(self, view: CardView) -> None:
        self._view = view
        self.namespaces = {one.namespace: one for one in view.namespaces()}

    def named(self, option: str, digits: str) -> bytes:
        """The namespace whose hex form begins so; all its digits may also name one of which the card knows nothing."""
        meant = [one for one in self.namespaces if one.hex().startswith(digits)]
        if len(meant) == 1:
            return meant[0]
        if not meant and len(digits) == 2 * NAMESPACE_BYTES:
            return bytes.fromhex(digits)
        if not meant:
            raise UserError(f"{option}: no namespace of the card begins with {digits}: `xkv namespaces` shows them")
        some = ", ".join(one.hex() for one in meant[:NAMED_MAX])
        raise UserError(f"{option}: {len(meant)} namespaces begin with {digits} ({some}…): type more digits of one")

    def identity_of(self, namespace: bytes) -> object | None:
        """What was published of it; None where nothing was."""
        one = self.namespaces.get(namespace)
        return None if one is None else identities.parsed(one.descriptor)

    def chunk(self, keys: Sequence[bytes], *, generation: int | None = None) -> Explanation:
        """Why a lookup of these objects, one of each rank, misses: the first that is not held tells.

        It is said whose it is where another rank's is held.
        """
        found = self._view.explain(keys)
        answers = [explain(one, found, generation=generation) for one in found.objects]
        first = next((number for number, one in enumerate(answers) if one.misses), 0)
        answer = answers[first]
        if answer.verdict is Verdict.NEVER_STORED:
            neighbours = self.neighbours(keys[first])
            if neighbours and neighbours[0].holds:
                answer = held_elsewhere(neighbours[0].found, neighbours[0].namespace.hex())
        held = sum(not one.misses for one in answers)
        if answer.misses and held:
            whose = f"rank {ObjectKey.decode(keys[first]).rank}'s object, where {held} of {len(keys)} ranks' are held: "
            answer = replace(answer, what=whose + answer.what)
        return answer

    def neighbours(self, key: bytes) -> list[Neighbour]:
        """Other namespaces, those that hold the same block first, then those that differ least."""
        namespace, rest = key[:NAMESPACE_BYTES], key[NAMESPACE_BYTES:]
        others = [one for one in list(self.namespaces)[:PROBED_MAX] if one != namespace]
        if not others:
            return []
        holders = {one.namespace for one in self._view.explain([other + rest for other in others]).objects if one.held}
        return self._compared(self.identity_of(namespace), others, holders)

    def nearest(self, identity: object) -> list[Neighbour]:
        """Namespaces of the card by how little they differ from an identity."""
        return self._compared(identity, list(self.namespaces), set())

    def _compared(self, identity: object, others: Sequence[bytes], holders: set[bytes]) -> list[Neighbour]:
        made = []
        for other in others:
            theirs = self.identity_of(other)
            known = identity is not None and theirs is not None
            made.append(Neighbour(other, identities.differences(identity, theirs) if known else (), other in holders))
        made.sort(key=lambda one: (not one.holds, not one.found, len(one.found)))
        return made[:NEIGHBOURS_TOLD_MAX]

    def compare(self, here: bytes, there: bytes) -> Explanation:
        """What makes two namespaces two. UserError where nothing was published of one."""
        told = []
        for one in (here, there):
            identity = self.identity_of(one)
            if identity is None:
                raise UserError(
                    f"nothing was published of namespace {one.hex()} on this card: its engine publishes it when it "
                    "starts (xkv namespaces shows which are known)"
                )
            told.append(identity)
        found = identities.differences(*told)
        if not found:
            return Explanation(
                Verdict.NOT_KNOWN,
                "what was published of the two is the same",
                "one of them is an engine's after a reset of its cache, or another release of xkv made it",
            )
        return other_identity(found, what=f"namespace {there.hex()}")
