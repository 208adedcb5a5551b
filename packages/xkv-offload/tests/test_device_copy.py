"""Waves through a staging area: every byte, whatever order a GPU does its work in; ends, errors, bounds.

The GPU is one of the tests' own (`LateDevice`): streams whose work runs late, in any order that their events allow, so
that what does not wait for what it should wait for is found. Triton's kernel runs in Triton's interpreter.
"""

import importlib
import os
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from xkv_offload import copy_triton, device_setup, staging_area
from xkv_offload.copy import Bytes, Move, RingSlots
from xkv_offload.copy_torch import TorchRows
from xkv_offload.device_copy import DeviceMover
from xkv_offload.failures import FailureLog, Plan
from xkv_offload.jobs import Priority
from xkv_offload.layout import ObjectLayout, Page, fragment_range
from xkv_offload.mapping import ChunkPart
from xkv_offload.rank import RankContext
from xkv_offload.rows import ROW_BYTES_MAX, Run, TensorPlace, WavePlan, make_piece, make_table, unit_bytes
from xkv_offload.staging_area import Copies, Division, RowCopier, StagingSlot, Work, divide, make_slots
from xkv_offload.transfer import XkvTransferSpec
from xkv_offload.worker import XkvWorker, _span
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
    def __init__(self, device: "LateDevice", *, urgent: bool) -> None:
        self._device = device
        self.urgent = urgent
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
        made = LateStream(self, urgent=urgent)
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
        """A batch: its runs one after another, in any order. None reaches out of a part that is registered."""
        runs = [(one, run) for one in copies for run in one.runs]
        for one, run in runs:
            begin = one.host.data_ptr() + run.ring_at
            for part in self.registered:
                of_part = range(part.ctypes.data, part.ctypes.data + part.nbytes)
                touched = begin < of_part.stop and begin + run.length > of_part.start
                assert not touched or (begin in of_part and begin + run.length <= of_part.stop), "across two parts"
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
    shared: bool = False,
    offset: int = 0,
    bpc: int = 3,
    seed: int = 0,
    fragments: int = 3,
    slots_per_direction: int = 2,
    poisoned: bool = False,
    copier: Callable[[RowCopier], RowCopier] = lambda rows: rows,
) -> Rig:
    """`pages`: of each group; every page has a tensor of its own, or every group the same tensors (`shared`). They
    begin `offset` bytes behind where memory does.
    """
    device = LateDevice(seed)
    generator = torch.Generator().manual_seed(seed)
    numbers = count()
    layouts = [
        ObjectLayout(bpc, tuple(Page(at if shared else next(numbers), size) for at, size in enumerate(group)))
        for group in pages
    ]
    sizes: dict[int, int] = {}
    for page in (page for layout in layouts for page in layout.pages):
        sizes[page.tensor] = max(page.page_bytes, sizes.get(page.tensor, 0))
    tensors = []
    for number in range(len(sizes)):
        memory = torch.full((offset + BLOCKS * (sizes[number] + padding),), POISON - 256, dtype=torch.int8)
        if not poisoned:
            memory.random_(-128, 127, generator=generator)
        tensors.append(memory[offset:].view(BLOCKS, -1))
    places = [TensorPlace(tensor.data_ptr(), tensor.stride(0)) for tensor in tensors]
    slot_bytes = HEADER_BYTES + FRAGMENT
    division = Division(slots_per_direction, 16_384 + fragments * slot_bytes, 16_384, fragments)
    if kernel == "triton":
        unit = unit_bytes(layouts=layouts, tensors=places, fragment_bytes=FRAGMENT)
        rows: RowCopier = copy_triton.TritonRows(unit_bytes=unit, largest_page_bytes=max(sizes.values()))
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
SHAPES: dict[str, dict[str, Any]] = {
    "even pages": {"pages": [[512, 512]]},
    "odd pages with padding": {"pages": [[701, 7, 1_200]], "padding": 13},
    "even pages in rows of odd lengths": {"pages": [[512, 256]], "padding": 5},
    "a page over several fragments": {"pages": [[9_001]], "padding": 3},
    "two groups": {"pages": [[640], [96, 320]]},
    "one page for all layers": {"pages": [[4_096]]},
    "MLA, 656 bytes a token": {"pages": [[656 * 5, 656 * 5]], "padding": 16},
    "groups packed in one tensor": {"pages": [[4_096], [4_096]], "shared": True},
    "groups that share tensors, with other pages": {"pages": [[701, 512], [96, 320]], "shared": True, "padding": 5},
    "tensors that begin anywhere": {"pages": [[640, 704]], "offset": 3},
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


def stored(ring: Bytes, move: Move) -> Bytes:
    """A move's bytes, as its slots in `ring` hold them."""
    payload = ring[numbers(move), HEADER_BYTES:].reshape(-1)
    at = (move.part.first - move.base_sub_block) * move.layout.block_bytes - move.first_fragment * FRAGMENT
    return payload[at : at + len(move.part.blocks) * move.layout.block_bytes]


def page_by_page(rows: Sequence[Bytes], move: Move) -> list[Bytes]:
    """The pages of a move, in the order of format v1 (docs/format.md), by numpy alone."""
    return [rows[page.tensor][block, : page.page_bytes] for block in move.part.blocks for page in move.layout.pages]


def numbers(move: Move) -> Sequence[int]:
    assert isinstance(move.slots, RingSlots)
    return move.slots.numbers


@KERNELS
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_every_byte_arrives_and_nothing_else_changes(
    interpreted: ModuleType, kernel: str, shape: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xkv_offload.device_copy.REGISTERED_BYTES_MAX", 7 * (HEADER_BYTES + FRAGMENT))
    rig = make_rig(kernel, **SHAPES[shape], seed=seed)
    assert len(rig.device.registered) > 10
    moves = moves_of(rig, seed)
    run(rig, moves, gather=True)
    for move in moves:
        assert (stored(rig.ring, move) == np.concatenate(page_by_page(rig.rows(), move))).all()
    others = sorted(set(range(SLOTS)) - {number for move in moves for number in numbers(move)})
    assert (rig.ring[others] == POISON).all(), "slots of others stay as they are"

    target = make_rig(kernel, **SHAPES[shape], seed=seed + 100, poisoned=True)
    target.ring[:] = rig.ring
    into = [replace(move, slots=RingSlots(target.ring, numbers(move))) for move in moves]
    expected = [row.copy() for row in target.rows()]
    run(target, into, gather=False)
    for move in into:
        content = stored(target.ring, move)
        for page in page_by_page(expected, move):
            page[:], content = content[: len(page)], content[len(page) :]
        assert not len(content)
    for got, wanted in zip(target.rows(), expected, strict=True):
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
    for _ in range(40):  # longer than the copies
        rig.device.enqueue(rig.device.engine, lambda: None)
    rig.device.enqueue(rig.device.engine, lambda: tensor.fill_(1))
    run(rig, moves, gather=False)
    rig.device.await_all()  # the pass as well: had the load not waited for it, it would come now
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


@pytest.mark.parametrize("after", range(1, 8))
def test_a_device_that_is_lost_ends_every_copy_once(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Whatever CUDA is asked from some call on, it answers with an error: nobody waits for ever, or asks for ever."""
    rig = make_rig("torch", pages=[[1_024]], seed=after)
    (layout,) = rig.layouts
    left = after

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise RuntimeError("the device is lost")
            return real(*arguments, **options)

        return call

    for owner, name in ((LateEvent, "query"), (LateEvent, "synchronize"), (LateStream, "synchronize")):
        monkeypatch.setattr(owner, name, failing(getattr(owner, name)))
    ends: list[list[Exception | None]] = [[] for _ in range(24)]
    for number, end in enumerate(ends):
        move = Move(ChunkPart(0, 0, 0, (1, 2, 3)), layout, RingSlots(rig.ring, [number]), 0, 0)
        start = rig.mover.start_scatter if number % 5 == 4 else rig.mover.start_gather
        start(move, rig.mover.ready_mark(), end.append)
    rounds = 0
    while rig.mover.advance():
        rounds += 1
        assert rounds < 100
    assert [len(end) for end in ends] == [1] * len(ends)
    assert "lost" in str(ends[-1][0])
    rig.mover.close()
    assert rig.device.registered == []


def test_the_ring_is_given_back_whatever_becomes_of_the_last_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig("torch", pages=[[64]])

    def fail(_: DeviceMover) -> bool:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(DeviceMover, "advance", fail)
    with pytest.raises(RuntimeError):
        rig.mover.close()
    assert rig.device.registered == []


def test_loads_have_urgent_streams_of_their_own() -> None:
    rig = make_rig("torch", pages=[[64]])
    loads, stores = rig.mover._loads, rig.mover._stores
    assert [one.urgent for one in (loads.rows_stream, loads.ring_stream)] == [True, True]
    assert [one.urgent for one in (stores.rows_stream, stores.ring_stream)] == [False, False]
    streams = {loads.rows_stream, loads.ring_stream, stores.rows_stream, stores.ring_stream, rig.device.engine}
    assert len(streams) == 5


class NoGateway:
    """What a worker asks of its client where none of its jobs has begun."""

    control = SimpleNamespace(set_loaded=lambda *_: None)

    def close(self) -> None:
        """There is none."""


def test_no_thread_of_ours_calls_the_device_before_the_first_job_and_vllms_only_marks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = make_rig("torch", pages=[[64]])
    calls: list[tuple[str, str]] = []

    def noted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            calls.append((threading.current_thread().name, name))
            return real(*arguments, **options)

        return call

    asked = {LateDevice: {*vars(LateDevice)}, LateEvent: {"query", "synchronize"}, LateStream: {"synchronize"}}
    for owner, names in asked.items():
        for name in sorted(name for name in names if not name.startswith("_")):
            monkeypatch.setattr(owner, name, noted(name, getattr(owner, name)))
    context = RankContext(
        client=NoGateway(),  # type: ignore[arg-type]
        rank=0,
        object_rank=0,
        writes=True,
        blocks_per_chunk=3,
        fragment_bytes=FRAGMENT,
        layouts=rig.layouts,
        lone_last_block=[False],
        positions={0: 0},
        mover=rig.mover,
        load_timeout_s=10.0,
        failure_plan=Plan("block_errors", ""),
        failures=FailureLog(),
    )
    worker = XkvWorker(context=context, transfer_result=SimpleNamespace)
    for _ in range(3):  # the copy thread goes round, and finds nothing to begin and nothing under way
        turn = threading.Event()
        assert worker._queue.push(Priority.STORE, 0, turn.set)
        assert turn.wait(10)
        assert worker.get_finished() == []
    assert calls == []
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        assert go_on.wait(10)

    worker._queue.push(Priority.WAITED_ON, 0, hold)
    assert held.wait(10)
    blocks = SimpleNamespace(block_ids=np.array([1, 2, 3], np.int32), group_sizes=[3], block_indices=[0])
    spec = XkvTransferSpec(
        namespace=b"n" * 16, keys=(bytes(36),), req_id="r", family=1, positions=(0,), replace=(False,)
    )
    worker.submit_store(1, blocks, spec)
    worker.submit_load(2, spec, blocks)
    assert worker.get_finished() == []
    own = threading.current_thread().name
    assert calls == [(own, "mark")] * 2
    worker._queue._work.clear()  # they are nobody's
    go_on.set()
    worker.shutdown()
    assert {thread for thread, _ in calls} == {own}, "what is left is ended on vLLM's thread, at the end"


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


@pytest.mark.parametrize("width", [np.int32, np.int64])
def test_block_ids_come_to_the_plan_as_they_are(width: type[np.signedinteger[Any]]) -> None:
    largest = int(np.iinfo(width).max)
    blocks = SimpleNamespace(
        block_ids=np.array([largest, 3], width), group_sizes=[2], block_indices=np.array([0], width)
    )
    span = _span(blocks)
    blocks.block_ids[:] = 0  # vLLM's own, which it uses again
    assert [type(one) for one in span.block_ids.tolist()] == [int, int]
    layout = ObjectLayout(2, (Page(0, 64),))
    table = make_table(
        layout=layout, base_sub_block=0, tensors=[TensorPlace(1 << 40, 64)], fragment_bytes=FRAGMENT, row_bytes=64
    )
    move = Move(
        ChunkPart(0, 0, 0, tuple(span.block_ids.tolist())), layout, RingSlots(np.zeros((1, 1), np.uint8), [0]), 0, 0
    )
    plan, words = WavePlan(words_max=64), np.zeros(64, np.int64)
    assert plan.add(make_piece(move, table, first=0, fragments=1, staged=0))
    written = plan.write(words, staging_address=1 << 41, slot_bytes=HEADER_BYTES + FRAGMENT)
    assert words[: written.words].tolist()[-2:] == [largest, 3]


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
    assert divide(staging_bytes=1 << 36, slot_bytes=1 << 12).fragments == 65_535, "of one launch"
    with pytest.raises(UserError, match=r"xkv\.staging_bytes = 1048576 is too small"):
        divide(staging_bytes=1 << 20, slot_bytes=1 << 20)


@pytest.mark.parametrize("staging_bytes", [1 << 20, 3 << 20, 50_000_001])
def test_what_the_slots_take_of_the_gpu_is_one_piece_within_the_bound(staging_bytes: int) -> None:
    taken: list[int] = []

    class Counting(LateDevice):
        def zeros(self, size_bytes: int) -> Any:
            taken.append(size_bytes)
            return super().zeros(size_bytes)

    division = divide(staging_bytes=staging_bytes, slot_bytes=1 << 16)
    slots = [slot for of_way in make_slots(Counting(0), division=division, slot_bytes=1 << 16) for slot in of_way]
    (total,) = taken
    assert total <= staging_bytes
    places = sorted((view.data_ptr(), len(view)) for slot in slots for view in (slot.area, slot.plan))
    assert all(at + length <= behind for (at, length), (behind, _) in pairwise(places)), "no two share a byte"


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
