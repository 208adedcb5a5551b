"""Some slots of one piece of memory, by their numbers: a view of one is made only where somebody looks into it.

Owns: which slots they are, how far each is meant, and where each begins. Must not know: whose memory it is, what lies
in it. An object has hundreds of slots, and whoever moves them wants addresses alone.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Sequence
from typing import Final, overload

_NUMBER: Final = struct.Struct("=Q")


class Sizes(Sequence[int]):
    """Numbers, all alike but the last: as an object's slots are."""

    __slots__ = ("_count", "each", "last")

    def __init__(self, count: int, each: int, last: int) -> None:
        self._count = count
        self.each = each
        self.last = last

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        return list(self)[index]

    def __iter__(self) -> Iterator[int]:
        return iter([self.each] * (self._count - 1) + [self.last] * (self._count > 0))

    def packed(self) -> bytes:
        """As numbers of 8 bytes of this machine."""
        return _NUMBER.pack(self.each) * (self._count - 1) + _NUMBER.pack(self.last) * (self._count > 0)

    def hold(self, skip: int, others: Sequence[int]) -> bool:
        """Whether each is as large as one of the others with `skip` more."""
        if len(others) != self._count:
            return False
        if isinstance(others, Sizes):
            return skip + others.last <= self.last and (self._count < 2 or skip + others.each <= self.each)
        return all(skip + other <= own for own, other in zip(self, others, strict=True))


class Slots(Sequence[memoryview]):
    """Equal slots of writable memory, which lives as long as this does; the last may be meant in part only."""

    __slots__ = ("_last_bytes", "_memory", "_numbers", "_slot_bytes")

    def __init__(
        self, memory: memoryview, slot_bytes: int, numbers: Sequence[int], *, last_bytes: int | None = None
    ) -> None:
        """`last_bytes`: so far the last is meant. IndexError for a number that is not in `memory`."""
        if numbers and (min(numbers) < 0 or (max(numbers) + 1) * slot_bytes > memory.nbytes):
            raise IndexError(f"slots {min(numbers)} to {max(numbers)} of {memory.nbytes // slot_bytes}")
        self._memory = memory
        self._slot_bytes = slot_bytes
        self._numbers = numbers
        self._last_bytes = slot_bytes if last_bytes is None else last_bytes

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> memoryview: ...

    @overload
    def __getitem__(self, index: slice) -> Slots: ...

    def __getitem__(self, index: int | slice) -> memoryview | Slots:
        if isinstance(index, slice):
            chosen = range(len(self._numbers))[index]
            assert index.step in {None, 1}, "the last would not be the last"
            last_bytes = self._last_bytes if chosen.stop == len(self._numbers) else self._slot_bytes
            return Slots(self._memory, self._slot_bytes, self._numbers[index], last_bytes=last_bytes)
        begin = self._numbers[index] * self._slot_bytes
        is_last = index in {-1, len(self._numbers) - 1}
        return self._memory[begin : begin + (self._last_bytes if is_last else self._slot_bytes)]

    def __iter__(self) -> Iterator[memoryview]:
        return map(self.__getitem__, range(len(self._numbers)))

    def cut(self, last_bytes: int) -> Slots:
        """The same, the last only so far."""
        assert 0 < last_bytes <= self._last_bytes
        return Slots(self._memory, self._slot_bytes, self._numbers, last_bytes=last_bytes)

    @property
    def sizes(self) -> Sizes:
        """The bytes of each."""
        return Sizes(len(self._numbers), self._slot_bytes, self._last_bytes)

    def addresses(self) -> bytes:
        """Where each begins, as numbers of 8 bytes of this machine."""
        base, each = ctypes.addressof(ctypes.c_char.from_buffer(self._memory)), self._slot_bytes
        return struct.pack(f"={len(self._numbers)}Q", *[base + number * each for number in self._numbers])
