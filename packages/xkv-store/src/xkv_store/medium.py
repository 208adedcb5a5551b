"""An object's bytes between slots in memory and the card's databases.

Owns the order of sealing and writing, of reading and proving, and how much is moved at once. Thread-safe: it has no
state of its own. Must not know the index, who uses which slot, or what an error is good for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from .database import Database, Place, read_proving, seal_and_write
from .errors import CorruptObject, MediumError, PeerError, without_trace
from .fragment import Identity, ObjectSlots, Piece, filled, headers_in_row, pieces
from .geometry import Geometry
from .native import copied_proving
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
        first, *rest = pieces(plan.extents, 0, plan.fragments, self._slots_at_once())
        self._write(own, plan.length, [first], slots, sums)
        if rest:
            reached("put.mid_write")
            self._write(own, plan.length, rest, slots, sums)

    def _write(
        self,
        own: ObjectSlots,
        length: int,
        those: Sequence[Piece],
        slots: Sequence[memoryview],
        sums: Sequence[int] | None,
    ) -> None:
        """Neighbouring pieces of an object of that length, whose slots (and sums) these are."""
        first, end = those[0].fragment, those[-1].fragment + those[-1].slots
        views = filled(slots[first:end], length, self.geometry, first)
        own_sums = sums[first:end] if sums is not None else None
        if seal_and_write(self._places(those), views, own.headers(end - first, first), own_sums):
            return
        for piece in those:
            part = slice(piece.fragment, piece.fragment + piece.slots)
            sealed = own.seal(slots[part], piece.fragment, sums[part] if sums is not None else None)
            self.databases[piece.database].write(piece.slot, sealed)

    def write_many(self, objects: Sequence[tuple[PutPlan, Sequence[memoryview]]]) -> list[Exception | None]:
        """As `write`, several objects of one extent each: what lies in neighbouring slots goes in one call.

        Returns each one's error, or None.
        """
        errors: list[Exception | None] = []
        row: list[tuple[PutPlan, Sequence[memoryview]]] = []
        next_place, is_whole = (0, 0), False

        def end_row() -> None:
            errors.extend([_error_of(partial(self._write_row, row))] * len(row))

        for plan, slots in objects:
            assert len(slots) == plan.fragments
            (extent,) = plan.extents
            if row and not (is_whole and next_place == (extent.database, extent.first)):
                end_row()
                row = []
            row.append((plan, slots))
            next_place = extent.database, extent.first + extent.slots
            is_whole = self.geometry.slot_fill_bytes(plan.length, plan.fragments - 1) == self.geometry.slot_bytes
        end_row()
        return errors

    def _write_row(self, objects: Sequence[tuple[PutPlan, Sequence[memoryview]]]) -> None:
        """Objects that lie behind one another, by one call. MediumError."""
        own = [ObjectSlots(self._identity(plan), self.geometry) for plan, _ in objects]
        both = list(zip(own, objects, strict=True))
        views = [view for plan, slots in objects for view in filled(slots, plan.length, self.geometry, 0)]
        headers = headers_in_row([(of, fragment) for of, (plan, _) in both for fragment in range(plan.fragments)])
        extent = objects[0][0].extents[0]
        database = self.databases[extent.database]
        if not seal_and_write([(database, extent.first, len(views))], views, headers):
            database.write(extent.first, [view for of, (_, slots) in both for view in of.seal(slots, 0)])

    def read(self, plan: GetPlan, slots: Sequence[memoryview], first_fragment: int) -> None:
        """Read fragments from `first_fragment` on into `slots`, and prove each. MediumError, CorruptObject.

        Fewer slots than the object has fragments: only these are read. The caller checks that they are not more.
        """
        if not (slots and 0 <= first_fragment <= plan.fragments - len(slots)):
            raise PeerError(f"{len(slots)} fragments from {first_fragment} on, of an object that has {plan.fragments}")
        own = ObjectSlots(self._identity(plan), self.geometry)
        views = filled(slots, plan.length, self.geometry, first_fragment)
        those = pieces(plan.extents, first_fragment, len(slots), self._slots_at_once())
        proved = None
        if prove is _PROVE:
            proved = read_proving(self._places(those), views, own.headers(len(slots), first_fragment))
        if proved is None:
            for piece in those:
                begin = piece.fragment - first_fragment
                own_views = views[begin : begin + piece.slots]
                self.databases[piece.database].read(piece.slot, own_views)
                prove(own, own_views, piece.fragment)
        elif proved < len(slots):
            prove(own, views[proved:], first_fragment + proved)

    def read_row(self, objects: Sequence[tuple[GetPlan, memoryview, int]]) -> list[Exception | None]:
        """As `read`, one fragment (its number) of each of several objects, in neighbouring slots: by one call.

        Returns each one's error, or None. Where the call fails each is read by itself: it may be the fault of one.
        """
        views = [filled([slot], plan.length, self.geometry, fragment)[0] for plan, slot, fragment in objects]
        own = [ObjectSlots(self._identity(plan), self.geometry) for plan, _, _ in objects]
        fragments = [fragment for _, _, fragment in objects]
        (first,) = pieces(objects[0][0].extents, fragments[0], 1)
        database, proved = self.databases[first.database], None
        try:
            if prove is _PROVE:
                headers = headers_in_row(list(zip(own, fragments, strict=True)))
                proved = read_proving([(database, first.slot, len(views))], views, headers)
            if proved is None:
                database.read(first.slot, views)
                proved = 0
        except (MediumError, CorruptObject):
            return [_error_of(partial(self.read, plan, [slot], fragment)) for plan, slot, fragment in objects]
        rest = list(zip(own, views, fragments, strict=True))[proved:]
        return [None] * proved + [_error_of(partial(prove, of, [view], fragment)) for of, view, fragment in rest]

    def copy(
        self, plan: GetPlan, source: Sequence[memoryview], slots: Sequence[memoryview], first_fragment: int
    ) -> None:
        """Copy fragments that `read` has brought into `source`, and prove each where it is now. CorruptObject."""
        own = ObjectSlots(self._identity(plan), self.geometry)
        from_views = filled(source, plan.length, self.geometry, first_fragment)
        to_views = filled(slots, plan.length, self.geometry, first_fragment)
        proved = copied_proving(from_views, to_views, own.headers(len(slots), first_fragment))
        if proved < len(slots) or prove is not _PROVE:
            prove(own, to_views[proved:], first_fragment + proved)

    def _identity(self, plan: ObjectPlan) -> Identity:
        return Identity(self.card_uuid, plan.encoded_key, plan.generation, plan.length, plan.family, plan.position)

    def _places(self, those: Sequence[Piece]) -> list[Place]:
        return [(self.databases[piece.database], piece.slot, piece.slots) for piece in those]

    def _slots_at_once(self) -> int:
        return max(1, BYTES_AT_ONCE // self.geometry.slot_bytes)


def _error_of(act: Callable[[], object]) -> Exception | None:
    try:
        act()
    except (MediumError, CorruptObject) as error:
        return without_trace(error)
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
