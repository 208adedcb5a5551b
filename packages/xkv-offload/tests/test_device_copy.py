"""Waves through a staging area: every byte, whatever order a GPU does its work in; ends, errors, bounds.

The GPU is one of the tests' own (`LateDevice`): streams whose work runs late, in any order that their events allow, so
that what does not wait for what it should wait for is found. Triton's kernel runs in Triton's interpreter.
"""

import importlib
import os
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from xkv_offload import copy_triton, device_setup, staging_area
from xkv_offload.copy import Bytes, HostMover, Move, RingSlots
from xkv_offload.copy_torch import TorchRows
from xkv_offload.device_copy import DeviceMover
from xkv_offload.layout import ObjectLayout, Page, fragment_range
from xkv_offload.mapping import ChunkPart
from xkv_offload.rows import ROW_BYTES_MAX, Run, TensorPlace, WavePlan, unit_bytes
from xkv_offload.staging_area import Copies, Division, RowCopier, StagingSlot, Work, divide
from xkv_store.errors import UserError
from xkv_store.geometry import HEADER_BYTES

POISON = 0xA5
BLOCKS = 12
SLOTS = 96
FRAGMENT = 3_072


class Moment:
    """A recording of an event: reached when the stream has come to it."""

    def __init__(self) -> None:
        self.reached = False


class LateStream:
    def __init__(self, device: "LateDevice") -> None:
        self._device = device
        self.queue: deque[Callable[[], bool]] = deque()

    def wait_event(self, event: "LateEvent") -> None:
        moment = event.moment
        self.queue.append(lambda: moment.reached)

    def then(self, work: Work) -> None:
        def run() -> bool:
            work()
            return True

        self.queue.append(run)

    def step(self) -> bool:
        """Run the next piece of work; False if there is none, or it waits."""
        if not self.queue or not self.queue[0]():
            return False
        self.queue.popleft()
        return True

    def synchronize(self) -> None:
        self._device.run_until(lambda: not self.queue)


class LateEvent:
    def __init__(self, device: "LateDevice") -> None:
        self._device = device
        self.moment = Moment()

    def record(self, stream: LateStream) -> None:
        moment = self.moment = Moment()
        stream.then(lambda: setattr(moment, "reached", True))

    def query(self) -> bool:
        self._device.run_some()
        return self.moment.reached

    def synchronize(self) -> None:
        self._device.run_until(lambda: self.moment.reached)


class LateDevice:
    """`engine` is the stream that vLLM works on."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._streams: list[LateStream] = []
        self.engine = self.stream(urgent=False)
        self.registered: list[Bytes] = []
        self.refuses = 0

    def run_some(self) -> None:
        for _ in range(self._random.randrange(6)):
            self._random.choice(self._streams).step()

    def run_until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            streams = self._random.sample(self._streams, len(self._streams))
            assert any(stream.step() for stream in streams), "everything waits for something"

    def zeros(self, size_bytes: int) -> Any:
        return torch.zeros(size_bytes, dtype=torch.int8)

    def pinned_words(self, count: int) -> Any:
        return torch.zeros(count, dtype=torch.int64)

    def host_bytes(self, array: Bytes) -> Any:
        return torch.from_numpy(array.reshape(-1).view(np.int8))

    def stream(self, *, urgent: bool) -> LateStream:
        made = LateStream(self)
        self._streams.append(made)
        return made

    def event(self) -> LateEvent:
        return LateEvent(self)

    def mark(self) -> LateEvent:
        event = LateEvent(self)
        event.record(self.engine)
        return event

    def enqueue(self, stream: LateStream, work: Work) -> None:
        stream.then(work)

    def copy(self, stream: LateStream, copies: Sequence[Copies], *, into_device: bool) -> None:
        """A batch: its runs one after another, in any order."""
        runs = [(one, run) for one in copies for run in one.runs]
        for one, run in self._random.sample(runs, len(runs)):
            stream.then(partial(copy_run, one, run, into_device=into_device))

    def await_all(self) -> None:
        self.run_until(lambda: not any(stream.queue for stream in self._streams))

    def register(self, parts: Sequence[Bytes]) -> None:
        self.registered += parts

    def unregister(self) -> None:
        self.registered.clear()


def copy_run(copies: Copies, run: Run, *, into_device: bool) -> None:
    staged = copies.staged[run.staged_at : run.staged_at + run.length]
    host = copies.host[run.ring_at : run.ring_at + run.length]
    into, source = (staged, host) if into_device else (host, staged)
    into.copy_(source)


@dataclass
class Rig:
    """A mover on a LateDevice, its tensors (int8 rows with padding behind each page), a ring."""

    device: LateDevice
    mover: DeviceMover
    tensors: list[Any]
    layouts: list[ObjectLayout]
    ring: Bytes

    def rows(self) -> list[Bytes]:
        return [tensor.numpy().view(np.uint8) for tensor in self.tensors]


def make_rig(
    kernel: str,
    *,
    pages: Sequence[Sequence[int]],
    padding: int = 0,
    bpc: int = 3,
    seed: int = 0,
    fragments: int = 3,
    slots_per_direction: int = 2,
    poisoned: bool = False,
    copier: Callable[[RowCopier], RowCopier] = lambda rows: rows,
) -> Rig:
    """`pages`: of each group; every page has a tensor of its own."""
    device = LateDevice(seed)
    generator = torch.Generator().manual_seed(seed)
    sizes = [size for group in pages for size in group]
    shapes = [(BLOCKS, size + padding) for size in sizes]
    tensors = [
        torch.full(shape, POISON - 256, dtype=torch.int8)
        if poisoned
        else torch.randint(-128, 127, shape, dtype=torch.int8, generator=generator)
        for shape in shapes
    ]
    numbers = iter(range(len(sizes)))
    layouts = [ObjectLayout(bpc, tuple(Page(next(numbers), size) for size in group)) for group in pages]
    places = [TensorPlace(tensor.data_ptr(), tensor.stride(0)) for tensor in tensors]
    slot_bytes = HEADER_BYTES + FRAGMENT
    division = Division(slots_per_direction, 16_384 + fragments * slot_bytes, 16_384, fragments)
    if kernel == "triton":
        unit = unit_bytes(layouts=layouts, tensors=places, fragment_bytes=FRAGMENT)
        rows: RowCopier = copy_triton.TritonRows(unit_bytes=unit, largest_page_bytes=max(sizes))
    else:
        rows = TorchRows(tensors)
    mover = DeviceMover(device=device, rows=copier(rows), division=division, tensors=places, fragment_bytes=FRAGMENT)
    ring = np.full((SLOTS, slot_bytes), POISON, np.uint8)
    mover.use_ring(ring, [range(SLOTS)])
    return Rig(device, mover, tensors, layouts, ring)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with monkeypatch.context() as patched:
        patched.setenv("TRITON_INTERPRET", "1")
        yield importlib.reload(copy_triton)
    importlib.reload(copy_triton)


KERNELS = pytest.mark.parametrize("kernel", ["torch", "triton"])
SHAPES = {
    "even pages": ([[512, 512]], 0),
    "odd pages with padding": ([[701, 7, 1_200]], 13),
    "a page over several fragments": ([[9_001]], 3),
    "two groups": ([[640], [96, 320]], 0),
    "one packed tensor": ([[4_096]], 0),
}


def moves_of(rig: Rig, seed: int) -> list[Move]:
    """Whole chunks, parts of chunks and lone last blocks, in slots here and there of the ring."""
    chosen = random.Random(seed)
    free = list(range(SLOTS))
    moves = []
    blocks = chosen.sample(range(BLOCKS), BLOCKS)
    while len(blocks) >= 3:
        layout = chosen.choice(rig.layouts)
        bpc = layout.blocks_per_chunk
        base = chosen.choice([0, 0, bpc - 1])
        first = bpc - 1 if base else chosen.randrange(bpc)
        part = ChunkPart(0, 0, first, tuple(blocks.pop() for _ in range(chosen.randint(1, bpc - first))))
        needed = fragment_range(
            first_byte=(first - base) * layout.block_bytes,
            length=len(part.blocks) * layout.block_bytes,
            fragment_bytes=FRAGMENT,
        )
        if len(needed) > len(free):
            break
        at = chosen.randrange(len(free) - len(needed) + 1)
        numbers, free[at : at + len(needed)] = free[at : at + len(needed)], []
        moves.append(Move(part, layout, RingSlots(rig.ring, numbers), needed.start, base))
    return moves


def run(rig: Rig, moves: Sequence[Move], *, gather: bool, marks: Sequence[object] | None = None) -> None:
    """Start all, then advance until nothing is under way; each must have ended once."""
    ended: list[int] = []
    start = rig.mover.start_gather if gather else rig.mover.start_scatter

    def end(number: int, error: Exception | None) -> None:
        assert error is None
        ended.append(number)

    for number, move in enumerate(moves):
        mark = marks[number] if marks else rig.mover.ready_mark()
        start(move, mark, lambda error, number=number: end(number, error))  # type: ignore[misc]
    while rig.mover.advance():
        pass
    assert sorted(ended) == list(range(len(moves)))


def payloads(ring: Bytes, moves: Sequence[Move]) -> list[Bytes]:
    """The bytes of each move as they lie in `ring`, gathered by what HostMover writes there."""
    found = []
    for move in moves:
        one = Move(move.part, move.layout, [ring[n] for n in numbers(move)], move.first_fragment, move.base_sub_block)
        rows = [np.zeros((BLOCKS, 1 << 14), np.uint8) for _ in range(8)]
        HostMover(rows).scatter(one)
        found.append(np.concatenate([row.reshape(-1) for row in rows]))
    return found


def numbers(move: Move) -> Sequence[int]:
    assert isinstance(move.slots, RingSlots)
    return move.slots.numbers


@KERNELS
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_every_byte_arrives_and_nothing_else_changes(
    interpreted: ModuleType, kernel: str, shape: str, seed: int
) -> None:
    pages, padding = SHAPES[shape]
    rig = make_rig(kernel, pages=pages, padding=padding, seed=seed)
    moves = moves_of(rig, seed)
    run(rig, moves, gather=True)
    expected = np.full_like(rig.ring, POISON)
    for move in moves:
        slots = [expected[number] for number in numbers(move)]
        HostMover(rig.rows()).gather(Move(move.part, move.layout, slots, move.first_fragment, move.base_sub_block))
    for got, wanted in zip(payloads(rig.ring, moves), payloads(expected, moves), strict=True):
        assert (got == wanted).all()
    others = sorted(set(range(SLOTS)) - {number for move in moves for number in numbers(move)})
    assert (rig.ring[others] == POISON).all(), "slots of others stay as they are"

    target = make_rig(kernel, pages=pages, padding=padding, seed=seed + 100, poisoned=True)
    target.ring[:] = rig.ring
    into = [
        Move(move.part, layout, RingSlots(target.ring, numbers(move)), move.first_fragment, move.base_sub_block)
        for move in moves
        for layout in target.layouts
        if layout == move.layout
    ]
    rows = [row.copy() for row in target.rows()]
    run(target, into, gather=False)
    for move in into:
        HostMover(rows).scatter(move)
    for got, wanted in zip(target.rows(), rows, strict=True):
        assert (got == wanted).all()


@pytest.mark.parametrize("seed", range(20))
def test_pages_are_read_after_what_vllm_had_queued_and_written_after_it(seed: int) -> None:
    rig = make_rig("torch", pages=[[1_024]], seed=seed, poisoned=True)
    (tensor,), (layout,) = rig.tensors, rig.layouts
    content = torch.randint(-128, 127, tensor.shape, dtype=torch.int8, generator=torch.Generator().manual_seed(seed))
    moves = [
        Move(ChunkPart(0, 0, 0, tuple(range(at, at + 3))), layout, RingSlots(rig.ring, [at]), 0, 0)
        for at in range(0, 9, 3)
    ]
    marks: list[object] = []
    for move in moves:
        blocks = list(move.part.blocks)
        rig.device.enqueue(rig.device.engine, lambda blocks=blocks: tensor.__setitem__(blocks, content[blocks]))  # type: ignore[misc]
        marks.append(rig.mover.ready_mark())
    run(rig, moves, gather=True, marks=marks)
    for move in moves:
        got = rig.ring[numbers(move)[0], HEADER_BYTES:]
        assert (got == content[list(move.part.blocks)].numpy().view(np.uint8).reshape(-1)).all()

    # a forward pass that was queued before the load still writes the pages' last owner's tokens
    rig.device.enqueue(rig.device.engine, lambda: tensor.fill_(1))
    run(rig, moves, gather=False)
    assert (tensor[:9] == content[:9]).all()


class Failing:
    """Rows of which the n-th wave cannot be queued."""

    def __init__(self, rows: RowCopier, wave: int) -> None:
        self._rows = rows
        self._left = wave

    def prepare(self, plan: WavePlan, slot: StagingSlot, *, into_pages: bool) -> tuple[int, Work]:
        self._left -= 1
        if self._left == 0:
            raise RuntimeError("no launch")
        return self._rows.prepare(plan, slot, into_pages=into_pages)


@pytest.mark.parametrize("wave", [1, 2, 3])
def test_a_wave_that_cannot_be_queued_fails_its_moves_and_no_others(wave: int) -> None:
    rig = make_rig("torch", pages=[[1_024]], bpc=12, copier=lambda rows: Failing(rows, wave))
    (layout,) = rig.layouts
    ends: dict[int, list[Exception | None]] = {0: [], 1: [], 2: []}
    for number, first in enumerate((0, 8, 20)):  # 4 slots each, 3 to a wave: 0 0 0 | 0 1 1 | 1 1 2 | 2 2 2
        move = Move(ChunkPart(0, 0, 0, tuple(range(12))), layout, RingSlots(rig.ring, range(first, first + 4)), 0, 0)
        rig.mover.start_gather(move, rig.mover.ready_mark(), ends[number].append)
    while rig.mover.advance():
        pass
    assert [len(end) for end in ends.values()] == [1, 1, 1]
    failed = {number for number, end in ends.items() if end[0] is not None}
    assert failed == {1: {0}, 2: {0, 1}, 3: {1, 2}}[wave]


def test_an_open_wave_does_not_wait_for_the_end_of_the_other_direction() -> None:
    rig = make_rig("torch", pages=[[64]])
    ends: list[Exception | None] = []
    move = Move(ChunkPart(0, 0, 0, (1, 2, 3)), rig.layouts[0], RingSlots(rig.ring, [0]), 0, 0)
    rig.mover.start_gather(move, rig.mover.ready_mark(), ends.append)
    for number in range(1, 200):  # loads that come without end
        other = Move(ChunkPart(0, 0, 0, (4, 5, 6)), rig.layouts[0], RingSlots(rig.ring, [number % 9 + 1]), 0, 0)
        rig.mover.start_scatter(other, rig.mover.ready_mark(), lambda _: None)
    assert ends == [None]


def test_offsets_beyond_four_gigabytes(interpreted: ModuleType) -> None:
    stride = (1 << 32) // 4 + 64
    memory = torch.empty(6 * stride, dtype=torch.int8)  # touched only where the pages lie
    tensor = memory.view(6, stride)
    layout = ObjectLayout(2, (Page(0, 256),))
    device = LateDevice(0)
    content = torch.randint(-128, 127, (2, 256), dtype=torch.int8)
    tensor[4:6, :256] = content
    places = [TensorPlace(tensor.data_ptr(), tensor.stride(0))]
    mover = DeviceMover(
        device=device,
        rows=interpreted.TritonRows(unit_bytes=16, largest_page_bytes=256),
        division=Division(1, 16_384 + 4_096, 16_384, 1),
        tensors=places,
        fragment_bytes=FRAGMENT,
    )
    ring = np.full((2, HEADER_BYTES + FRAGMENT), POISON, np.uint8)
    mover.use_ring(ring, [range(2)])
    ended: list[Exception | None] = []
    for number, blocks in enumerate(((4, 5), (5, 4))):
        move = Move(ChunkPart(0, 0, 0, blocks), layout, RingSlots(ring, [number]), 0, 0)
        mover.start_gather(move, mover.ready_mark(), ended.append)
    while mover.advance():
        pass
    assert ended == [None, None]
    got = ring[:, HEADER_BYTES : HEADER_BYTES + 512].view(np.int8).reshape(2, 2, 256)
    assert (got[0] == content.numpy()).all()
    assert (got[1] == content.numpy()[::-1]).all()


def test_the_ring_is_registered_in_bounded_parts_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig("torch", pages=[[64]])
    slot = HEADER_BYTES + FRAGMENT
    assert sum(part.nbytes for part in rig.device.registered) == rig.ring.nbytes
    rig.mover.close()
    assert rig.device.registered == []
    monkeypatch.setattr("xkv_offload.device_copy.REGISTERED_BYTES_MAX", 10 * slot + 5)
    rig = make_rig("torch", pages=[[64]])
    rig.mover.close()
    rig.mover.use_ring(rig.ring, [range(4, 23), range(23, 30), range(50, 60), range(96, 96)])
    begins = [(part.ctypes.data - rig.ring.ctypes.data) // slot for part in rig.device.registered]
    assert begins == [4, 10, 20, 50]
    assert [len(part) for part in rig.device.registered] == [6, 10, 10, 10]


def test_copies_after_a_fork_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig("torch", pages=[[64]])
    ended: list[Exception | None] = []
    monkeypatch.setattr(os, "getpid", lambda: -1)
    move = Move(ChunkPart(0, 0, 0, (1, 2, 3)), rig.layouts[0], RingSlots(rig.ring, [0]), 0, 0)
    rig.mover.start_gather(move, None, ended.append)
    assert "fork" in str(ended[0])
    assert not rig.mover.advance()


def test_a_staging_area_is_divided_whole_or_refused() -> None:
    for staging_bytes in (1 << 20, 3 << 20, 1 << 25, 1 << 28):
        division = divide(staging_bytes=staging_bytes, slot_bytes=1 << 18)
        total = staging_area.DIRECTIONS * division.slots_per_direction * division.bytes_per_slot
        assert division.fragments >= 1
        assert division.plan_bytes + (division.fragments << 18) <= division.bytes_per_slot
        assert total <= staging_bytes
    assert divide(staging_bytes=1 << 28, slot_bytes=1 << 18).slots_per_direction == 4
    with pytest.raises(UserError, match=r"xkv\.staging_bytes = 1048576 is too small"):
        divide(staging_bytes=1 << 20, slot_bytes=1 << 20)


def test_the_rows_are_tritons_where_its_kernel_proves_itself(
    interpreted: ModuleType, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig("torch", pages=[[ROW_BYTES_MAX + 160]], padding=48)
    choose: dict[str, Any] = {
        "device": rig.device,
        "tensors": rig.tensors,
        "places": [TensorPlace(tensor.data_ptr(), tensor.stride(0)) for tensor in rig.tensors],
        "layouts": rig.layouts,
        "fragment_bytes": FRAGMENT,
    }
    division = divide(staging_bytes=1 << 20, slot_bytes=HEADER_BYTES + FRAGMENT)
    assert isinstance(device_setup.choose_rows(division=division, **choose), interpreted.TritonRows)
    assert not caplog.records
    small = Division(1, 4_096, 64, 1)
    assert isinstance(device_setup.choose_rows(division=small, **choose), TorchRows)
    assert "too many rows" in caplog.text
    monkeypatch.setattr(interpreted.TritonRows, "_launch", lambda *_: None)
    assert isinstance(device_setup.choose_rows(division=division, **choose), TorchRows)
    assert "did not copy" in caplog.text
