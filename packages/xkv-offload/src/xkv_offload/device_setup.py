"""How the KV pages of one GPU are going to be copied.

Owns: the choice between Triton and torch alone, and between batches and single copies; the proof at start-up that what
was chosen copies bytes.
Must not know: waves, jobs, the ring. Imports torch.
"""

import importlib.util
import logging
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final, Protocol

import torch

from xkv_store.geometry import HEADER_BYTES

from .copy import Move
from .copy_torch import TorchRows
from .cuda import CudaDevice
from .device_copy import DeviceMover
from .layout import ObjectLayout, Page
from .mapping import ChunkPart
from .rows import (
    PIECE_WORDS,
    ROW_BYTES_MAX,
    ROW_WORDS,
    Run,
    TensorPlace,
    WavePlan,
    make_piece,
    make_table,
    unit_bytes,
)
from .staging_area import WORD_BYTES, Copies, Device, Division, RowCopier, divide, make_slots

logger = logging.getLogger(__name__)

SLOWER: Final = "xkv: KV pages are gathered by torch, page by page, many times slower: %s"
_PROOF_RUNS: Final = (Run(0, 8_192, 4_096), Run(8_192, 0, 5), Run(12_288, 12_289, 4_095))
_PROOF_WORDS: Final = 2_048
_PROOF_BYTES: Final = 251  # a prime: no two rows begin alike


def make_device_mover(
    *, tensors: Sequence[Any], staging_bytes: int, layouts: Sequence[ObjectLayout], fragment_bytes: int
) -> DeviceMover:
    """The mover for `tensors` (int8, one row per block) of one GPU.

    Raises UserError if a fragment does not fit the staging area.
    """
    device = CudaDevice(tensors[0].device)
    choose_copies(device)
    division = divide(staging_bytes=staging_bytes, slot_bytes=HEADER_BYTES + fragment_bytes)
    places = [TensorPlace(tensor.data_ptr(), tensor.stride(0) * tensor.element_size()) for tensor in tensors]
    return DeviceMover(
        device=device,
        rows=choose_rows(
            device=device,
            tensors=tensors,
            places=places,
            layouts=layouts,
            division=division,
            fragment_bytes=fragment_bytes,
        ),
        division=division,
        tensors=places,
        fragment_bytes=fragment_bytes,
    )


class BatchingDevice(Device, Protocol):
    """A device that may copy in batches; `cuda.CudaDevice`, and tests' own."""

    def use_batches(self) -> bool:
        """From now on, where there are any."""

    def use_no_batches(self) -> None:
        """From now on."""


def choose_copies(device: BatchingDevice) -> None:
    """A wave's copies in one call where the driver has such a call, and it copies bytes; else one by one."""
    try:
        if device.use_batches():
            prove_copies(device)
    except Exception as error:  # noqa: BLE001 - a driver has a say in it
        logger.warning("xkv: copies between GPU and ring are queued one by one: %s", error)
        device.use_no_batches()


def choose_rows(
    *,
    device: Device,
    tensors: Sequence[Any],
    places: Sequence[TensorPlace],
    layouts: Sequence[ObjectLayout],
    division: Division,
    fragment_bytes: int,
) -> RowCopier:
    """Triton's kernel where it is there, compiles, copies bytes, and its plans fit; else torch's copies.

    Compiles both directions now: the first job does not wait for it.
    """
    if importlib.util.find_spec("triton") is None:
        logger.warning(SLOWER, "there is no Triton")
        return TorchRows(tensors)
    needed = words_needed(layouts=layouts, places=places, fragment_bytes=fragment_bytes)
    if needed * WORD_BYTES > division.plan_bytes:
        logger.warning(SLOWER, f"a fragment has too many rows ({needed} words): give a larger xkv.staging_bytes")
        return TorchRows(tensors)
    try:
        from .copy_triton import TritonRows  # noqa: PLC0415 - Triton is asked for where it is used

        page_bytes = max((page.page_bytes for layout in layouts for page in layout.pages), default=1)
        unit = unit_bytes(layouts=layouts, tensors=places, fragment_bytes=fragment_bytes)
        rows = TritonRows(unit_bytes=unit, largest_page_bytes=page_bytes)
        prove(device, rows, fragment_bytes=fragment_bytes, page_bytes=min(page_bytes, ROW_BYTES_MAX, fragment_bytes))
    except Exception as error:  # noqa: BLE001 - a compiler, a linker and a driver have a say in it
        logger.warning(SLOWER, f"Triton's kernel does not run here ({type(error).__name__}: {error})")
        return TorchRows(tensors)
    return rows


def words_needed(*, layouts: Sequence[ObjectLayout], places: Sequence[TensorPlace], fragment_bytes: int) -> int:
    """The words of a plan for the one fragment that needs most."""
    most = 0
    for layout in layouts:
        for base in {0, layout.blocks_per_chunk - 1}:
            firsts = make_table(
                layout=layout,
                base_sub_block=base,
                tensors=places,
                fragment_bytes=fragment_bytes,
                row_bytes=ROW_BYTES_MAX,
            ).first_of_fragment
            rows = max((end - begin for begin, end in pairwise(firsts)), default=0)
            most = max(most, rows * ROW_WORDS + PIECE_WORDS + layout.blocks_per_chunk)
    return most


def prove(device: Device, rows: RowCopier, *, fragment_bytes: int, page_bytes: int) -> None:
    """Copy one page there and back through `rows`, in memory of our own; raises where a byte is wrong."""
    slot_bytes = HEADER_BYTES + fragment_bytes
    division = Division(slots_per_direction=1, bytes_per_slot=slot_bytes + 4096, plan_bytes=4096, fragments=1)
    (slot,), _ = make_slots(device, division=division, slot_bytes=slot_bytes)
    page = device.zeros(page_bytes)
    layout = ObjectLayout(1, (Page(0, page_bytes),))
    table = make_table(
        layout=layout,
        base_sub_block=0,
        tensors=[TensorPlace(page.data_ptr(), page_bytes)],
        fragment_bytes=fragment_bytes,
        row_bytes=ROW_BYTES_MAX,
    )
    expected = (torch.arange(page_bytes) % _PROOF_BYTES).to(torch.uint8).view(torch.int8)
    stream = device.stream(urgent=False)
    for into_pages in (False, True):
        staged = slot.area[HEADER_BYTES : HEADER_BYTES + page_bytes]
        source, target = (staged, page) if into_pages else (page, staged)
        source.copy_(expected)
        target.zero_()
        device.await_all()
        plan = WavePlan(words_max=division.plan_bytes // WORD_BYTES)
        move = Move(ChunkPart(0, 0, 0, (0,)), layout, (), 0, 0)
        assert plan.add(make_piece(move, table, first=0, fragments=1, staged=0))
        plan_bytes, copy_rows = rows.prepare(plan, slot, into_pages=into_pages)
        device.copy(stream, (Copies(slot.plan, slot.host_plan, (Run(0, 0, plan_bytes),)),), into_device=True)
        device.enqueue(stream, copy_rows)
        slot.done.record(stream)
        slot.done.synchronize()
        if not torch.equal(target.cpu(), expected):
            raise RuntimeError("the kernel did not copy what it was to copy")


def prove_copies(device: Device) -> None:
    """Copy some runs to the GPU and some back, in memory of our own; raises where a byte is wrong."""
    staged, words = device.zeros(_PROOF_WORDS * WORD_BYTES), device.pinned_words(_PROOF_WORDS)
    host = words.view(torch.int8)
    content = (torch.arange(len(host)) % _PROOF_BYTES).to(torch.uint8).view(torch.int8)
    stream, done = device.stream(urgent=False), device.event()
    for into_device in (True, False):
        into, source = (staged, host) if into_device else (host, staged)
        source.copy_(content)
        into.zero_()
        expected = torch.zeros_like(content)
        for run in _PROOF_RUNS:
            at, source_at = (run.staged_at, run.ring_at) if into_device else (run.ring_at, run.staged_at)
            expected[at : at + run.length] = content[source_at : source_at + run.length]
        device.await_all()
        device.copy(stream, (Copies(staged, host, _PROOF_RUNS),), into_device=into_device)
        done.record(stream)
        done.synchronize()
        if not torch.equal(into.cpu(), expected):
            raise RuntimeError("a batch did not copy what it was to copy")
