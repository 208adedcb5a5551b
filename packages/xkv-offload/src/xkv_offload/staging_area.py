"""The staging area on a GPU, cut into slots that live for one wave.

Owns: how `xkv.staging_bytes` are divided, and what a slot consists of.
Must not know: what is copied through a slot, how rows are copied, CUDA (a `Device` makes memory and events).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from xkv_store.errors import UserError

from .copy import Bytes
from .rows import Run, WavePlan, Words

Work = Callable[[], None]
"""Something that queues work on the device's current stream and does not wait for it."""

DIRECTIONS: Final = 2  # stores and loads have slots of their own, so that neither waits for the other's
SLOTS_TRIED: Final = (4, 2, 1)
"""For each direction: several, so that copies follow one another though the copy thread comes late; but not so many
that a wave is less than FRAGMENTS_GOOD."""
FRAGMENTS_GOOD: Final = 8  # 2 MiB a wave: below, what a wave costs the CPU is more than its copy takes
PLAN_PARTS: Final = 32  # of a slot, one in so many bytes is for the plan: 1 MiB of 32, 26,000 rows
PLAN_BYTES_MIN: Final = 65_536
ALIGNMENT: Final = 512
FRAGMENTS_MAX: Final = 65_535  # each may be a piece of its own, and CUDA launches no more of them at once
WORD_BYTES: Final = 8


class Event(Protocol):
    """As torch's."""

    def record(self, stream: Any) -> None:
        """Reached when the stream has come here."""

    def query(self) -> bool:
        """Whether it is reached."""

    def synchronize(self) -> None:
        """Wait until it is."""


class Copies(NamedTuple):
    """Runs of bytes between a piece of GPU memory and one of host memory, both flat int8 tensors."""

    staged: Any
    host: Any
    runs: Sequence[Run]


class Device(Protocol):
    """What copies need of a GPU; `cuda.CudaDevice`, and tests' own."""

    def zeros(self, size_bytes: int) -> Any:
        """A flat int8 tensor there."""

    def pinned_words(self, count: int) -> Any:
        """A flat int64 tensor in host memory that the GPU reads directly."""

    def host_bytes(self, array: Bytes) -> Any:
        """A flat int8 tensor over an array in host memory, without a copy."""

    def stream(self, *, urgent: bool) -> Any:
        """A stream of our own, with wait_event(event) and synchronize()."""

    def event(self) -> Event:
        """An event that a thread waits for without spinning."""

    def mark(self) -> object:
        """An event recorded on the stream that this thread works on."""

    def enqueue(self, stream: Any, work: Work) -> None:
        """Call `work` with `stream` as the current one."""

    def copy(self, stream: Any, copies: Sequence[Copies], *, into_device: bool) -> None:
        """Queue all these runs on `stream`, in any order among themselves."""

    def await_all(self) -> None:
        """Wait for everything that was queued on the device. At start-up alone."""

    def register(self, parts: Sequence[Bytes]) -> None:
        """Let the GPU reach this memory directly, each part by itself; where that is refused, copies are slower."""

    def unregister(self) -> None:
        """Undo it."""


class RowCopier(Protocol):
    """Copies the rows of a wave between pages and a staging slot."""

    def prepare(self, plan: WavePlan, slot: "StagingSlot", *, into_pages: bool) -> tuple[int, Work]:
        """How many bytes of `slot.host_plan` belong into `slot.plan`, and what to queue then to copy the rows."""


@dataclass(frozen=True, slots=True)
class StagingSlot:
    """Room for a wave: `area` (at `address`) holds whole ring slots, `plan` its plan, which comes from `host_plan`.

    `words`, `host_words`: the same plans as words. `staged`: between the wave's two streams. `done`: after all of it.
    """

    area: Any
    address: int
    slot_bytes: int
    plan: Any
    host_plan: Any
    words: Any
    host_words: Words
    staged: Event
    done: Event


@dataclass(frozen=True, slots=True)
class Division:
    """How a staging area is divided."""

    slots_per_direction: int
    bytes_per_slot: int
    plan_bytes: int
    fragments: int


def divide(*, staging_bytes: int, slot_bytes: int) -> Division:
    """The division of `staging_bytes`. UserError where no fragment fits."""
    found = None
    for slots in SLOTS_TRIED:
        each = staging_bytes // (DIRECTIONS * slots) // ALIGNMENT * ALIGNMENT
        plan_bytes = max(PLAN_BYTES_MIN, each // PLAN_PARTS // ALIGNMENT * ALIGNMENT)
        found = Division(slots, each, plan_bytes, min(FRAGMENTS_MAX, (each - plan_bytes) // slot_bytes))
        if found.fragments >= FRAGMENTS_GOOD:
            return found
    assert found is not None
    if found.fragments < 1:
        needed = DIRECTIONS * (slot_bytes + PLAN_BYTES_MIN + ALIGNMENT)
        raise UserError(
            f"xkv.staging_bytes = {staging_bytes} is too small for fragments of {slot_bytes} bytes: give at "
            f"least {needed}"
        )
    return found


def make_slots(device: Device, *, division: Division, slot_bytes: int) -> list[list[StagingSlot]]:
    """The slots of each direction, cut from one piece of GPU memory."""
    import torch  # noqa: PLC0415 - there is a device, so there is torch

    everything = device.zeros(DIRECTIONS * division.slots_per_direction * division.bytes_per_slot)
    made = []
    for number in range(DIRECTIONS * division.slots_per_direction):
        begin = number * division.bytes_per_slot
        plan_end = begin + division.plan_bytes
        area = everything[plan_end : plan_end + division.fragments * slot_bytes]
        plan = everything[begin:plan_end]
        host_words = device.pinned_words(division.plan_bytes // WORD_BYTES)
        made.append(
            StagingSlot(
                area=area,
                address=area.data_ptr(),
                slot_bytes=slot_bytes,
                plan=plan,
                host_plan=host_words.view(torch.int8),
                words=plan.view(torch.int64),
                host_words=host_words.numpy(),
                staged=device.event(),
                done=device.event(),
            )
        )
    return [made[: division.slots_per_direction], made[division.slots_per_direction :]]
