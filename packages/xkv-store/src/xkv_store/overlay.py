"""The index as the main thread sees it: what is committed, with what is not yet committed laid over it.

Owns the ordered queue of changes, the overlay that answers for them, and turning them into batches. Must not
know slots, the medium, the table or policy. Main thread only; the committer sees a batch and nothing else.
"""

import hashlib
from collections import deque
from collections.abc import Container, Iterable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from .errors import MediumError, PeerError
from .geometry import RANK_MAX
from .index import NOWHERE, Change, Index, MoveObject, RemoveNamespace, RemoveObject, SetNamespace, SetObject
from .key import RANK_BYTES, encoded_entry
from .layout import BadBytesError, Record, order_key_of, pack_order_key, pack_record, parse_record
from .limbo import Ghost
from .table import TableWriter

CHANGES_PER_BATCH_MAX = 4_096  # a transaction of some 20 ms: what a confirmation may wait for another
CHANGES_QUEUED_MAX = 65_536  # beyond this nothing new is admitted: the index does not keep up, or fails

NAMESPACES_MAX = 1_024  # on a card: at 60 KB each some 64 MB of the smallest index's 256; models in use are a handful
NAMESPACES_QUEUED_MAX = 16  # not yet committed: an engine adopts one; bounds a batch and what waits while commits fail
NAMESPACES_REMOVED_MAX = 256  # in one batch, where a card has too many


@dataclass(slots=True, eq=False)
class Step:
    """One queued change. When it is committed, its `ghosts` are settled."""

    change: Change
    generation: int = 0  # of the object that is set, 0 otherwise
    ghosts: list[Ghost] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CommitBatch:
    """Changes to be applied in one transaction, in order."""

    steps: tuple[Step, ...]
    generation_ceiling: int | None

    @property
    def changes(self) -> Iterable[Change]:
        """What to apply."""
        return [step.change for step in self.steps]

    @property
    def places(self) -> list[tuple[bytes, bytes]]:
        """(order key, key) of each object that it sets or moves: where it stands in the order once that is done."""
        moved = [change for change in self.changes if isinstance(change, SetObject | MoveObject)]
        return [(order_key_of(change.record), change.key) for change in moved]


_Entry: TypeAlias = tuple[Step, Record | None]


class Overlay:
    """Reads and queues; see the module's docstring."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._entries: dict[bytes, _Entry] = {}
        self._known = _known_namespaces(index)  # namespace -> digest of its descriptor; those not used longest first
        self._namespaces: dict[bytes, bytes] = {}  # to be committed, newest last
        self._forgotten: dict[bytes, None] = {}  # to be removed, before those are written
        self._queue: deque[Step] = deque()
        self._batch: CommitBatch | None = None
        self._ceiling: int | None = None

    def __len__(self) -> int:
        """Changes that are not yet committed."""
        committing = len(self._batch.steps) if self._batch else 0
        return len(self._queue) + len(self._namespaces) + len(self._forgotten) + committing

    @property
    def full(self) -> bool:
        """Whether nothing new should be admitted."""
        return len(self) >= CHANGES_QUEUED_MAX

    def record(self, key: bytes, *, committed: bool = True) -> Record | None:
        """The present record of an object, of what waits alone if it is not `committed`. MediumError: no index."""
        entry = self._entries.get(key)
        if entry is not None:
            return entry[1]
        packed = self._index.get(key) if committed else None
        return _parse(packed) if packed is not None else None

    def chunk(self, chunk_key: bytes, objects_max: int) -> list[tuple[bytes, Record]]:
        """The present, committed objects of a chunk. (One that waits for its commit is the caller's to know.)"""
        found = []
        for key, packed in self._index.chunk(chunk_key, objects_max):
            record = self.present(key, packed)
            if record is not None:
                found.append((key, record))
        return found

    def present(self, key: bytes, packed: bytes) -> Record | None:
        """The present record of an object whose committed one is `packed`."""
        entry = self._entries.get(key)
        return entry[1] if entry is not None else _parse(packed)

    def set(self, key: bytes, record: Record, replaced: Ghost | None, *, is_new: bool = False) -> None:
        """Queue an object. `is_new`: it is certain that there is none of that key, or will be none by then."""
        ghosts = [replaced] if replaced is not None else []
        stood = NOWHERE if is_new else _place_of(replaced.record) if replaced is not None else None
        self._push(key, Step(SetObject(key, pack_record(record), stood), record.generation, ghosts), record)

    def move(self, key: bytes, record: Record, former: Record | None = None) -> None:
        """Queue another place in the order for an object that is committed. Where that fails, it keeps its old one."""
        stood = _place_of(former) if former is not None else None
        self._push(key, Step(MoveObject(key, pack_record(record), stood)), record)

    def remove(self, key: bytes, ghost: Ghost) -> None:
        """Queue the removal of the present object of that key, which is `ghost` from now on."""
        self._push(key, Step(RemoveObject(key, _place_of(ghost.record)), 0, [ghost]), None)

    def set_namespace(self, namespace: bytes, descriptor: bytes) -> None:
        """Queue a namespace's descriptor, unless it is known. Of many that wait, the newest are written."""
        digest = _digest(descriptor)
        former = self._known.pop(namespace, None)
        self._known[namespace] = digest
        if former != digest:
            self._namespaces.pop(namespace, None)
            self._namespaces[namespace] = descriptor
            self._bound_namespaces()

    def forget_namespace(self, namespace: bytes) -> None:
        """Queue the removal of a namespace's descriptor. One that is published before its commit stays."""
        self._namespaces.pop(namespace, None)
        if self._known.pop(namespace, None) is not None:
            self._forgotten[namespace] = None

    def raise_ceiling(self, generation_ceiling: int) -> None:
        """Have a new ceiling of generations made durable with the next batch."""
        self._ceiling = generation_ceiling

    def take(self) -> CommitBatch | None:
        """The next batch; None where there is nothing to commit, or the last batch has not come back."""
        if self._batch is not None:
            return None
        steps = self._take_namespaces()
        if not (steps or self._queue or self._ceiling is not None):
            return None
        steps += [self._queue.popleft() for _ in range(min(len(self._queue), CHANGES_PER_BATCH_MAX))]
        self._batch = CommitBatch(tuple(steps), self._ceiling)
        self._ceiling = None
        return self._batch

    def settle(self, batch: CommitBatch) -> list[tuple[SetObject, int, Record | None]]:
        """`batch` is committed. (change, generation, its record if it is still the key's present one) of each
        object that it set.
        """
        assert batch is self._batch
        self._batch = None
        self._index.refresh()
        done = []
        for step in batch.steps:
            present = self._drop(step)
            for ghost in step.ghosts:
                ghost.settled = True
            if isinstance(step.change, SetObject):
                done.append((step.change, step.generation, present))
        return done

    def undo(self, batch: CommitBatch) -> list[tuple[SetObject, Step, Record | None]]:
        """`batch` could not be committed, or only perhaps: its objects are removed instead, in its place.

        (change, the step that removes it now, its record if it was the key's present one) of each object that
        it would have set; a ghost with that record belongs into the step's ghosts.
        """
        assert batch is self._batch
        self._batch = None
        self._index.refresh()
        if batch.generation_ceiling is not None and self._ceiling is None:
            self._ceiling = batch.generation_ceiling
        undone: list[tuple[SetObject, Step, Record | None]] = []
        again = []
        for step in batch.steps:
            if isinstance(step.change, SetObject):
                key = step.change.key
                removal = Step(RemoveObject(key), 0, step.ghosts)
                present = self._drop(step)
                if present is not None:
                    self._entries[key] = (removal, None)
                undone.append((step.change, removal, present))
                again.append(removal)
            elif isinstance(step.change, RemoveObject):
                again.append(step)
            elif isinstance(step.change, MoveObject):
                self._drop(step)
        self._queue.extendleft(reversed(again))
        for step in self._queue:  # it was told on the assumption that all before it is done
            if not isinstance(step.change, SetNamespace | RemoveNamespace):
                step.change = replace(step.change, stood=None)
        self._undo_namespaces(batch)
        return undone

    def _take_namespaces(self) -> list[Step]:
        steps = [Step(RemoveNamespace(one)) for one in self._forgotten]
        self._forgotten.clear()
        for _ in range(min(len(self._known) - NAMESPACES_MAX, NAMESPACES_REMOVED_MAX)):
            oldest = next(iter(self._known))
            del self._known[oldest]
            self._namespaces.pop(oldest, None)
            steps.append(Step(RemoveNamespace(oldest)))
        steps += [Step(SetNamespace(*item)) for item in self._namespaces.items()]
        self._namespaces.clear()
        return steps

    def _undo_namespaces(self, batch: CommitBatch) -> None:
        """What was to be written is older than what waits by now, what was to be removed older than all."""
        changes = [step.change for step in batch.steps]
        written = {change.namespace: change.descriptor for change in changes if isinstance(change, SetNamespace)}
        removed = {change.namespace: _UNKNOWN for change in changes if isinstance(change, RemoveNamespace)}
        self._namespaces = written | self._namespaces
        self._known = removed | self._known
        self._bound_namespaces()

    def _bound_namespaces(self) -> None:
        while len(self._namespaces) > NAMESPACES_QUEUED_MAX:
            oldest = next(iter(self._namespaces))
            del self._namespaces[oldest]
            self._known[oldest] = _UNKNOWN  # the next publishing writes it

    def _push(self, key: bytes, step: Step, record: Record | None) -> None:
        self._queue.append(step)
        self._entries[key] = (step, record)

    def _drop(self, step: Step) -> Record | None:
        """Take the step out of the overlay; the record that it stood for, if nothing later stands for the key."""
        if isinstance(step.change, SetNamespace | RemoveNamespace):
            return None
        entry = self._entries.get(step.change.key)
        if entry is None or entry[0] is not step:
            return None
        del self._entries[step.change.key]
        return entry[1]


@dataclass(frozen=True, slots=True)
class Present:
    """What the choice of what leaves sees of a card: present objects, and those that something holds."""

    index: Index
    overlay: Overlay
    table: TableWriter
    busy_chunks: Container[bytes]  # with an object that is being put, or not yet committed
    pinned: Container[int]  # generations that are being read
    objects: int  # of those that may leave

    def order_from(self, order_key: bytes, limit: int, end: bytes) -> list[tuple[bytes, bytes]]:
        """(order key, object key) of the next committed objects."""
        return self.index.order_from(order_key, limit, end)

    def chunk(self, key: bytes) -> list[tuple[bytes, Record]]:
        """The present objects of the chunk that an object belongs to; a lone one is a single look into the index."""
        if self._is_alone(key):
            record = self.overlay.record(key)
            return [(key, record)] if record is not None else []
        return self.overlay.chunk(key[:-RANK_BYTES], RANK_MAX + 1)

    def held(self, chunk_key: bytes, chunk: list[tuple[bytes, Record]]) -> bool:
        """Whether the chunk must stay for now."""
        return chunk_key in self.busy_chunks or any(record.generation in self.pinned for _, record in chunk)

    def refile(self, key: bytes, record: Record, former: Record) -> None:
        """The object has another place in the order."""
        self.overlay.move(key, record, former)

    def _is_alone(self, key: bytes) -> bool:
        """Whether the lookup table knows of this rank's object and of no other of the chunk.

        One of a rank on another page of ranks may be there: it is found, and leaves, in its own place.
        """
        try:
            tag, bit = encoded_entry(key)
        except PeerError:
            return False
        answer = self.table.get(tag)
        return answer is not None and answer[1] == bit


_UNKNOWN = b""  # no descriptor's digest


def _place_of(record: Record) -> bytes:
    """Its key in the order."""
    return pack_order_key(record.family, record.position, record.generation)


def _digest(descriptor: bytes) -> bytes:
    return hashlib.blake2b(descriptor, digest_size=16).digest()


def _known_namespaces(index: Index) -> dict[bytes, bytes]:
    try:
        return {namespace: _digest(descriptor) for namespace, descriptor in index.namespaces().items()}
    except MediumError:
        return {}  # each is written again when it is published


def _parse(packed: bytes) -> Record | None:
    """A record that cannot be parsed is damage: a miss, which the next start removes."""
    try:
        return parse_record(packed)
    except BadBytesError:
        return None
