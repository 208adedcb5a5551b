"""An object's bytes between slots in memory and the card's databases.

Owns the order of sealing and writing, of reading and proving, and how much is moved at once. Thread-safe: it has no
state of its own. Must not know the index, who uses which slot, or what an error is good for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from .database import Database
from .errors import CorruptObject, MediumError, PeerError
from .fragment import Identity, ObjectSlots, filled, pieces
from .geometry import HEADER_BYTES, Geometry
from .native import copied
from .plans import GetPlan, ObjectPlan, PutPlan
from .testing.points import reached

BYTES_AT_ONCE = 8 << 20  # sealed, then written (read, then proved): the medium waits for a part, not a whole object
prove = ObjectSlots.prove  # by this name, so that tests can take what is read as it comes
_PROVE = prove  # while it is this one, sums may be made as bytes come


@dataclass(frozen=True, slots=True)
class Medium:
    """The databases of one card, in the order of their numbers."""

    databases: Sequence[Database]
    geometry: Geometry
    card_uuid: bytes

    def write(self, plan: PutPlan, slots: Sequence[memoryview], sums: Sequence[int] | None = None) -> None:
        """Seal the object's slots where they are (payloads in place) and write them. MediumError.

        `slots` are whole, page-aligned slots, one per fragment, which nobody else touches meanwhile. `sums`: of their
        payloads, where they were made before.
        """
        assert len(slots) == plan.fragments
        own = ObjectSlots(self._identity(plan), self.geometry)
        for count, piece in enumerate(pieces(plan.extents, 0, plan.fragments, self._slots_at_once())):
            if count == 1:
                reached("put.mid_write")
            part = slice(piece.fragment, piece.fragment + piece.slots)
            sealed = own.seal(slots[part], piece.fragment, sums[part] if sums is not None else None)
            self.databases[piece.database].write(piece.slot, sealed)

    def write_many(self, objects: Sequence[tuple[PutPlan, Sequence[memoryview]]]) -> list[Exception | None]:
        """As `write`, several objects of one extent each: what lies in neighbouring slots goes in one call.

        Returns each one's error, or None.
        """
        errors: list[Exception | None] = []
        row: list[memoryview] = []
        database, first, objects_in_row = 0, 0, 0

        def end_row() -> None:
            error = None
            if row:
                try:
                    self.databases[database].write(first, row)
                except MediumError as found:
                    error = found
            errors.extend([error] * objects_in_row)

        for plan, slots in objects:
            assert len(slots) == plan.fragments
            (extent,) = plan.extents
            sealed = ObjectSlots(self._identity(plan), self.geometry).seal(slots, 0)
            is_next = (database, first + len(row)) == (extent.database, extent.first)
            if not (row and is_next and len(row[-1]) == self.geometry.slot_bytes):
                end_row()
                row, database, first, objects_in_row = [], extent.database, extent.first, 0
            row += sealed
            objects_in_row += 1
        end_row()
        return errors

    def read(self, plan: GetPlan, slots: Sequence[memoryview], first_fragment: int) -> None:
        """Read fragments from `first_fragment` on into `slots`, and prove each. MediumError, CorruptObject.

        Fewer slots than the object has fragments: only these are read. The caller checks that they are not more.
        """
        if not (slots and 0 <= first_fragment <= plan.fragments - len(slots)):
            raise PeerError(f"{len(slots)} fragments from {first_fragment} on, of an object that has {plan.fragments}")
        own = ObjectSlots(self._identity(plan), self.geometry)
        views = filled(slots, plan.length, self.geometry, first_fragment)
        for piece in pieces(plan.extents, first_fragment, len(slots), self._slots_at_once()):
            begin = piece.fragment - first_fragment
            own_views = views[begin : begin + piece.slots]
            payload_bytes = own.payload_bytes(piece.slots, piece.fragment) if prove is _PROVE else None
            sums = self.databases[piece.database].read(piece.slot, own_views, payload_bytes)
            if sums is None:
                prove(own, own_views, piece.fragment)
            else:
                own.prove(own_views, piece.fragment, sums)

    def read_row(self, objects: Sequence[tuple[GetPlan, memoryview, int]]) -> list[Exception | None]:
        """As `read`, one fragment (its number) of each of several objects, in neighbouring slots: by one call.

        Returns each one's error, or None. Where the call fails each is read by itself: it may be the fault of one.
        """
        views = [filled([slot], plan.length, self.geometry, fragment)[0] for plan, slot, fragment in objects]
        own = [ObjectSlots(self._identity(plan), self.geometry) for plan, _, _ in objects]
        payload_bytes = [of.payload_bytes(1, fragment)[0] for of, (_, _, fragment) in zip(own, objects, strict=True)]
        (first,) = pieces(objects[0][0].extents, objects[0][2], 1)
        try:
            sums = self.databases[first.database].read(first.slot, views, payload_bytes if prove is _PROVE else None)
        except (MediumError, CorruptObject):
            return [_error_of(partial(self.read, plan, [slot], fragment)) for plan, slot, fragment in objects]
        errors = []
        for number, (of, view, (_, _, fragment)) in enumerate(zip(own, views, objects, strict=True)):
            if sums is None:
                proof = partial(prove, of, [view], fragment)
            else:
                proof = partial(of.prove, [view], fragment, sums[number : number + 1])
            errors.append(_error_of(proof))
        return errors

    def copy(
        self, plan: GetPlan, source: Sequence[memoryview], slots: Sequence[memoryview], first_fragment: int
    ) -> None:
        """Copy fragments that `read` has brought into `source`, and prove each where it is now. CorruptObject."""
        own = ObjectSlots(self._identity(plan), self.geometry)
        from_views = filled(source, plan.length, self.geometry, first_fragment)
        to_views = filled(slots, plan.length, self.geometry, first_fragment)
        sums = copied(from_views, to_views, HEADER_BYTES, own.payload_bytes(len(slots), first_fragment))
        if prove is _PROVE:
            own.prove(to_views, first_fragment, sums)
        else:
            prove(own, to_views, first_fragment)

    def _identity(self, plan: ObjectPlan) -> Identity:
        return Identity(self.card_uuid, plan.encoded_key, plan.generation, plan.length, plan.family, plan.position)

    def _slots_at_once(self) -> int:
        return max(1, BYTES_AT_ONCE // self.geometry.slot_bytes)


def _error_of(act: Callable[[], object]) -> Exception | None:
    try:
        act()
    except (MediumError, CorruptObject) as error:
        return error
    return None


def read_through(
    read: Callable[[GetPlan, Sequence[memoryview], int], None],
    plan: GetPlan,
    slots: Sequence[memoryview],
    fragments: range,
) -> None:
    """Prove these fragments: `read` them (as `Medium.read`), so many at a time as there are slots, over each other."""
    for first in range(fragments.start, fragments.stop, len(slots)):
        read(plan, slots[: fragments.stop - first], first)
