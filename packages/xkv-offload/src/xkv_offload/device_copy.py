"""Copies between KV tensors on a GPU and the ring: in waves, through staging slots, several under way.

Owns: `DeviceMover`: what goes into which wave, the order of a wave's steps on its streams, when a copy has ended.
Must not know: how rows are copied (a `RowCopier`), CUDA (a `Device`), jobs, the gateway. Design: docs/adr/0008.
"""

import logging
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from xkv_store.geometry import HEADER_BYTES

from .copy import Bytes, End, Move
from .layout import ObjectLayout
from .metrics import count
from .rows import ROW_BYTES_MAX, Run, Table, TensorPlace, WavePlan, make_piece, make_table, runs
from .staging_area import WORD_BYTES, Copies, Device, Division, RowCopier, StagingSlot, make_slots

logger = logging.getLogger(__name__)

REGISTERED_BYTES_MAX: Final = 1 << 28
"""The ring is registered in parts of so many bytes: a call locks the process's memory map while it pins. No copy may
reach across two parts."""


@dataclass(slots=True, eq=False)
class _Copy:
    """A move, from its start to its end. `left`: slots that no wave has brought to their end yet."""

    end: End
    left: int
    error: Exception | None = None


@dataclass(slots=True, eq=False)
class _Wave:
    """What one staging slot is used for. `used`: places taken in it."""

    slot: StagingSlot
    plan: WavePlan
    used: int = 0
    copies: list[tuple[_Copy, int]] = field(default_factory=list)
    marks: list[Any] = field(default_factory=list)
    error: Exception | None = None


@dataclass(slots=True, eq=False)
class _Direction:
    """Stores or loads: slots and streams of its own."""

    into_pages: bool
    rows_stream: Any
    ring_stream: Any
    free: list[StagingSlot]
    open: _Wave | None = None
    under_way: deque[_Wave] = field(default_factory=deque)


class DeviceMover:
    """The mover for tensors on a GPU. A wave's pages are gathered into a slot in one launch and copied to the ring from
    there, or the other way round, while the waves before and after it do the other half.
    """

    def __init__(
        self,
        *,
        device: Device,
        rows: RowCopier,
        division: Division,
        tensors: Sequence[TensorPlace],
        fragment_bytes: int,
    ) -> None:
        self._device = device
        self._rows = rows
        self._tensors = tensors
        self._fragment_bytes = fragment_bytes
        self._slot_bytes = HEADER_BYTES + fragment_bytes
        self._fragments = division.fragments
        self._words_max = division.plan_bytes // WORD_BYTES
        self._tables: dict[tuple[int, int], tuple[ObjectLayout, Table]] = {}
        self._ring: Any = None
        self._cut_bytes = max(1, REGISTERED_BYTES_MAX // self._slot_bytes) * self._slot_bytes
        self._pid = os.getpid()
        stores, loads = make_slots(device, division=division, slot_bytes=self._slot_bytes)
        self._stores = self._direction(stores, into_pages=False)
        self._loads = self._direction(loads, into_pages=True)

    def _direction(self, slots: list[StagingSlot], *, into_pages: bool) -> _Direction:
        rows_stream, ring_stream = (self._device.stream(urgent=into_pages) for _ in range(2))
        return _Direction(into_pages, rows_stream, ring_stream, slots)

    def use_ring(self, ring: Bytes, numbers: Sequence[range]) -> None:
        """See Mover: the slots' memory is registered, in bounded parts."""
        slots_per_part = self._cut_bytes // self._slot_bytes
        parts = []
        for slots in _merged(numbers):
            edges = range(slots.start // slots_per_part * slots_per_part, slots.stop, slots_per_part)
            parts += [ring[max(edge, slots.start) : min(edge + slots_per_part, slots.stop)] for edge in edges]
        self._device.register(parts)
        self._ring = self._device.host_bytes(ring)

    def ready_mark(self) -> object:
        """See Mover."""
        return self._device.mark()

    def start_gather(self, move: Move, mark: object, end: End) -> None:
        """See Mover."""
        self._launch(self._loads)
        self._start(self._stores, move, mark, end)

    def start_scatter(self, move: Move, mark: object, end: End) -> None:
        """See Mover."""
        self._launch(self._stores)  # somebody may wait for it, and loads may come for long
        self._start(self._loads, move, mark, end)

    def advance(self) -> bool:
        """See Mover. Loads first: requests wait for them."""
        directions = (self._loads, self._stores)
        for direction in directions:
            self._launch(direction)
        busy = [direction for direction in directions if direction.under_way]
        if busy and not self._end_finished():
            self._end_oldest(busy[0])
        return bool(busy)

    def close(self) -> None:
        """See Mover."""
        try:
            while self.advance():
                pass
        finally:
            self._device.unregister()

    # -- inside ----------------------------------------------------------------------------------------------

    def _start(self, direction: _Direction, move: Move, mark: object, end: End) -> None:
        if os.getpid() != self._pid:
            end(RuntimeError("copies were set up in another process: CUDA does not survive a fork"))
            return
        total = len(move.slots)
        copy = _Copy(end, total)
        first = 0
        try:
            table = self._table(move.layout, move.base_sub_block)
            while first < total:
                wave = self._open_wave(direction)
                taken = self._add(wave, move, table, range(first, total))
                first += taken
                if taken:
                    wave.copies.append((copy, taken))
                    if not wave.marks or mark is not wave.marks[-1]:
                        wave.marks.append(mark)
                if not taken or wave.used == self._fragments:
                    self._launch(direction)
        except Exception as error:  # noqa: BLE001 - it is told to the copy's owner, who counts and logs it
            copy.error = error
            _have_ended(copy, total - first)

    def _add(self, wave: _Wave, move: Move, table: Table, slots: range) -> int:
        """Put the first of these slots of a move into a wave; how many. There is room for one in an empty wave."""
        first = slots.start
        taken = min(len(slots), self._fragments - wave.used)
        while taken and not wave.plan.add(make_piece(move, table, first=first, fragments=taken, staged=wave.used)):
            taken //= 2
        assert taken or wave.used, "a fragment's rows fit a plan: that was checked"
        wave.used += taken
        return taken

    def _table(self, layout: ObjectLayout, base_sub_block: int) -> Table:
        """The table of objects of `layout` that begin with sub-block `base_sub_block`; made once."""
        known = self._tables.get((id(layout), base_sub_block))
        if known is None:
            table = make_table(
                layout=layout,
                base_sub_block=base_sub_block,
                tensors=self._tensors,
                fragment_bytes=self._fragment_bytes,
                row_bytes=ROW_BYTES_MAX,
            )
            known = self._tables[id(layout), base_sub_block] = (layout, table)
        return known[1]

    def _open_wave(self, direction: _Direction) -> _Wave:
        if direction.open is None:
            if not direction.free:
                self._end_oldest(direction)
            direction.open = _Wave(direction.free.pop(), WavePlan(words_max=self._words_max))
        return direction.open

    def _launch(self, direction: _Direction) -> None:
        wave, direction.open = direction.open, None
        if wave is None:
            return
        try:
            self._enqueue(direction, wave)
        except Exception as error:  # noqa: BLE001 - it is told to the copies' owners, who count and log it
            wave.error = error
        direction.under_way.append(wave)
        self._end_finished()

    def _enqueue(self, direction: _Direction, wave: _Wave) -> None:
        """Queue a wave's steps; nothing here waits for the GPU."""
        device, slot = self._device, wave.slot
        plan_bytes, copy_rows = self._rows.prepare(wave.plan, slot, into_pages=direction.into_pages)
        plan = Copies(slot.plan, slot.host_plan, (Run(0, 0, plan_bytes),) if plan_bytes else ())
        found = runs(wave.plan.pieces, slot_bytes=self._slot_bytes, cut_bytes=self._cut_bytes)
        copies = Copies(slot.area, self._ring, found)
        rows_stream, ring_stream = direction.rows_stream, direction.ring_stream
        if direction.into_pages:
            device.copy(ring_stream, (plan, copies), into_device=True)  # the plan not behind copies of later waves
            slot.staged.record(ring_stream)
            rows_stream.wait_event(slot.staged)
            _wait_for(wave.marks, rows_stream)
            device.enqueue(rows_stream, copy_rows)
            slot.done.record(rows_stream)
        else:
            device.copy(rows_stream, (plan,), into_device=True)
            _wait_for(wave.marks, rows_stream)
            device.enqueue(rows_stream, copy_rows)
            slot.staged.record(rows_stream)
            ring_stream.wait_event(slot.staged)
            device.copy(ring_stream, (copies,), into_device=False)
            slot.done.record(ring_stream)

    def _end_finished(self) -> int:
        """End the waves whose last step is over, without waiting; how many."""
        ended = 0
        for direction in (self._loads, self._stores):
            while direction.under_way and _is_over(direction.under_way[0]):
                self._end_oldest(direction)
                ended += 1
        return ended

    def _end_oldest(self, direction: _Direction) -> None:
        """Wait for the oldest wave; tell its copies' owners."""
        wave = direction.under_way.popleft()
        try:
            if wave.error is not None:
                for stream in (direction.rows_stream, direction.ring_stream):
                    stream.synchronize()
            else:
                wave.slot.done.synchronize()
        except Exception as error:  # noqa: BLE001 - as in _launch
            wave.error = wave.error or error
        direction.free.append(wave.slot)
        for copy, slots in wave.copies:
            copy.error = copy.error or wave.error
            _have_ended(copy, slots)


def _wait_for(marks: Sequence[Any], stream: Any) -> None:
    """Pages are touched only after what vLLM had queued when the copies were asked for."""
    for mark in marks:
        stream.wait_event(mark)


def _is_over(wave: _Wave) -> bool:
    if wave.error is None:
        try:
            return wave.slot.done.query()
        except Exception as error:  # noqa: BLE001 - as in _launch; a device that is lost says so at every question
            wave.error = error
    return True


def _have_ended(copy: _Copy, slots: int) -> None:
    """So many slots of a copy have arrived, or will not; after the last its owner is told."""
    copy.left -= slots
    if copy.left:
        return
    try:
        copy.end(copy.error)
    except Exception:
        count("worker_errors")
        logger.exception("The end of a copy failed")


def _merged(numbers: Sequence[range]) -> list[range]:
    """Neighbouring ranges as one."""
    merged: list[range] = []
    for one in sorted((one for one in numbers if one), key=lambda one: one.start):
        if merged and merged[-1].stop == one.start:
            merged[-1] = range(merged[-1].start, one.stop)
        else:
            merged.append(one)
    return merged
