"""Many slots in one call: summed, copied, read and proved, sealed and written, by the optional library.

Owns: finding and proving the library (packages/xkv-store/native/xkv.c), calling it; checksums and copies without it.
Must not know: what a slot's header says (`layout` tells the library), or what an error is good for. Thread-safe.

The library gives what python-xxhash gives, bit for bit; why it exists is in ADR 0018. A call lets other threads have
the interpreter once, however many payloads there are.
"""

import ctypes
import errno
import logging
import os
import struct
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from .geometry import HEADER_BYTES
from .layout import SLOT_HEADER_FORM, SlotHeader, SlotHeaders, checksum
from .slots import Sizes, Slots

log = logging.getLogger(__name__)

ENVIRONMENT_NAME: Final = "XKV_NATIVE"  # "0": the library is not used though it is there
LIBRARY: Final = Path(__file__).with_name("libxkv.so.2")  # its number is another when a call of it is
INPUT_BYTES_MIN: Final = 241  # shorter ones are Python's
_PLACE_FACTOR: Final = 65_536  # of what the library says has failed: the errno is the rest
_CUT_SHORT: Final = 65_535  # no errno: a call moved less than it was asked for
_ELF_HEADER: Final = struct.Struct("<40xQ10xHH2x")  # where its last table begins, the bytes of an entry, entries
_HEADER_BYTES_MAX: Final = 4_096  # the library makes them on its stack (HEADER_BYTES_MAX)
_PROVED_BYTES: Final = (241, 1_023, 1_024, 1_025, 2_048, 2_049, 5_000)  # ends in, at and behind a block of 1,024 bytes

assert HEADER_BYTES <= _HEADER_BYTES_MAX


class UnreachableError(ValueError):
    """Memory that must not be reached by its address: read only, or less than what is asked of it."""


class Headers(NamedTuple):
    """What the headers of some slots must say.

    `templates`: a header of the first, and the others are the fragments behind that one; or each one's, one behind the
    other. Of a template that counts which is the same in each. `payload_bytes`: of each slot, behind its header.
    """

    templates: bytes
    payload_bytes: Sequence[int]

    @property
    def step_bytes(self) -> int:
        """From one slot's template to the next one's."""
        return HEADER_BYTES if len(self.templates) > HEADER_BYTES else 0


class FilePlace(NamedTuple):
    """So many slots one behind the other from `offset` on in a file, of which so many bytes are moved in a call.

    `address`: where that is mapped, or 0. Then the core copies it; the kernel, where the file is shorter or has holes.
    """

    fd: int
    offset: int
    slots: int
    step_bytes: int
    address: int = 0


class PlaceError(OSError):
    """An error of the system. `place`: the number of the place where it was."""

    def __init__(self, code: int, text: str, place: int) -> None:
        super().__init__(code, text)
        self.place = place

    def __reduce__(self) -> tuple[type["PlaceError"], tuple[int, str, int]]:
        return type(self), (self.errno or 0, self.strerror or "", self.place)


class Native:
    """The library's functions, for memory that whoever calls holds. UnreachableError."""

    def __init__(self, path: Path) -> None:
        """OSError where it cannot be loaded, AttributeError where it is another library."""
        _check_whole(path)
        library = ctypes.CDLL(str(path))
        numbers, size, number = ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint64
        sums = ctypes.POINTER(number)
        headers = (numbers, numbers, number)  # their form, templates, and from one of these to the next
        self._checksums = library.xkv_checksums
        self._checksums.argtypes, self._checksums.restype = (size, number, numbers, numbers, sums), None
        self._copy = library.xkv_copy
        self._copy.argtypes = (number, size, numbers, numbers, numbers, numbers, sums, *headers)
        file = (size, numbers, *headers, numbers, numbers, numbers)
        self._read, self._write = library.xkv_read, library.xkv_write
        self._read.argtypes, self._write.argtypes = file, (*file, numbers, ctypes.c_int)
        for function in (self._copy, self._read, self._write):
            function.restype = ctypes.c_int64

    def checksums(self, buffers: Sequence[memoryview], skip: int, payload_bytes: Sequence[int]) -> list[int]:
        """See `payload_checksums`; what is too short for the library is 0."""
        count = len(buffers)
        sums = (ctypes.c_uint64 * count)()
        self._checksums(count, skip, _places(buffers, skip, payload_bytes)[0], _packed(payload_bytes), sums)
        return sums[:]

    def copy(
        self, buffers: Sequence[memoryview], into: Sequence[memoryview], skip: int, payload_bytes: Sequence[int]
    ) -> list[int]:
        """See `copied`."""
        _, sums = self._copied(buffers, into, skip, payload_bytes, (None, None, 0))
        return list(_with_short(sums[:], into, skip, payload_bytes))

    def copy_proving(self, buffers: Sequence[memoryview], into: Sequence[memoryview], headers: Headers) -> int:
        """See `copied_proving`."""
        of = _words_of(headers, len(buffers))
        return self._copied(buffers, into, HEADER_BYTES, headers.payload_bytes, of)[0]

    def _copied(
        self,
        buffers: Sequence[memoryview],
        into: Sequence[memoryview],
        skip: int,
        payload_bytes: Sequence[int],
        headers: tuple[bytes | None, bytes | None, int],
    ) -> "tuple[int, ctypes.Array[ctypes.c_uint64]]":
        count = len(buffers)
        addresses, sizes = _places(buffers, skip, payload_bytes)
        places, _ = _places(into, 0, sizes)
        sums = (ctypes.c_uint64 * count)()
        whole = _packed(sizes)
        proved: int = self._copy(skip, count, addresses, places, whole, _packed(payload_bytes), sums, *headers)
        return proved, sums

    def read(self, places: Sequence[FilePlace], buffers: Sequence[memoryview], headers: Headers) -> int | None:
        """Read what lies in these places into as many buffers, and prove it as it comes.

        How many of the buffers, from the first on, are proved: those are sound, of the others nothing is known. None
        where a call moved less than it should: then everything is to be read anew. PlaceError.
        """
        return self._moved(self._read, places, buffers, headers)

    def write(
        self,
        places: Sequence[FilePlace],
        buffers: Sequence[memoryview],
        headers: Headers,
        sums: Sequence[int] | None = None,
    ) -> bool:
        """Seal the buffers and write them to these places.

        `sums`: of their payloads, where they are known. False as None of `read`: everything is to be written anew.
        PlaceError.
        """
        known = sums
        if known is None:
            known = _with_short(Sizes(len(buffers), 0, 0), buffers, HEADER_BYTES, headers.payload_bytes)
        assert len(known) == len(buffers), "the library would reach beyond them"
        more = _packed(known), int(sums is not None)
        return self._moved(self._write, places, buffers, headers, *more) is not None

    def _moved(
        self,
        function: Callable[..., int],
        places: Sequence[FilePlace],
        buffers: Sequence[memoryview],
        headers: Headers,
        *more: object,
    ) -> int | None:
        assert sum(place.slots for place in places) == len(buffers), "the library would reach beyond them"
        addresses, sizes = _places(buffers, HEADER_BYTES, headers.payload_bytes)
        files = struct.pack(f"={len(FilePlace._fields) * len(places)}Q", *chain.from_iterable(places))
        of = _words_of(headers, len(buffers))
        answer = function(len(places), files, *of, addresses, _packed(sizes), _packed(headers.payload_bytes), *more)
        if answer >= 0:
            return answer
        place, code = divmod(-answer, _PLACE_FACTOR)
        if code in {errno.EINTR, _CUT_SHORT}:
            return None
        raise PlaceError(code, os.strerror(code), place)


def _check_whole(path: Path) -> None:
    """OSError where the file ends before its table of sections: loading what was cut may end the process (SIGBUS)."""
    with path.open("rb") as file:
        header = file.read(_ELF_HEADER.size)
        if len(header) == _ELF_HEADER.size:
            begin, entry_bytes, entries = _ELF_HEADER.unpack(header)
            if begin + entry_bytes * entries <= file.seek(0, os.SEEK_END):
                return
    raise OSError(errno.ENOEXEC, "it was cut short", str(path))


@cache
def library() -> Native | None:
    """The library; None where it is not there, is not to be used, or does not do what it must."""
    if os.environ.get(ENVIRONMENT_NAME) == "0" or not LIBRARY.is_file():
        return None
    try:
        found = Native(LIBRARY)
    except (OSError, AttributeError) as error:
        log.warning("%s is not used: %s", LIBRARY, error)
        return None
    try:
        problem = _problem(found)
    except (OSError, UnreachableError) as error:
        problem = f"it cannot be tried ({error})"
    if problem:
        log.warning("%s is not used: %s", LIBRARY, problem)
        return None
    return found


def _problem(found: Native) -> str:
    """What it does otherwise than Python; nothing where it is right."""
    sample = bytearray(number * number * 13 >> 3 & 255 for number in range(max(_PROVED_BYTES) + HEADER_BYTES))
    buffers = [memoryview(sample)] * len(_PROVED_BYTES)
    wanted = [checksum(memoryview(sample)[1 : 1 + n]) for n in _PROVED_BYTES]
    into = [memoryview(bytearray(len(sample))) for _ in buffers]
    if not found.checksums(buffers, 1, _PROVED_BYTES) == found.copy(buffers, into, 1, _PROVED_BYTES) == wanted:
        return "its checksums are wrong"
    if into != buffers:
        return "its copies are wrong"
    return "" if _seals_and_proves(found, into) else "its headers are wrong"


def _seals_and_proves(found: Native, slots: Sequence[memoryview]) -> bool:
    """Whether what it has sealed is as Python would have it, in memory and in a file, and it proves that alone."""
    header = SlotHeader(b"key", 0, 9, 0, 1 << 40, 1 << 33, 0, b"the card's uuid.", 1 << 63, 5)
    made, elsewhere = SlotHeaders(header), SlotHeaders(header._replace(family=9, position=1 << 31))
    headers, count = Headers(made.of(2, 0, 0), _PROVED_BYTES), len(slots)
    payloads = [bytes(slot[HEADER_BYTES : HEADER_BYTES + n]) for slot, n in zip(slots, _PROVED_BYTES, strict=True)]
    wanted = [
        made.of(number, len(payload), checksum(payload)) + payload + bytes(len(slots[0]) - HEADER_BYTES - len(payload))
        for number, payload in enumerate(payloads, 2)
    ]
    fd = os.memfd_create("xkv-proof", os.MFD_CLOEXEC)
    try:
        places = [FilePlace(fd, 8, 2, 5_000), FilePlace(fd, 8 + 2 * len(slots[0]), count - 2, 9_000)]
        is_sealed = found.write(places, slots, headers)
        in_file = os.pread(fd, count * len(slots[0]) + 1, 8)
        is_read = found.read(places, slots, headers) == count
        moved, damaged = bytearray(wanted[0]), bytearray(wanted[-1])
        moved[:HEADER_BYTES] = elsewhere.of(2, _PROVED_BYTES[0], checksum(payloads[0]))
        damaged[0] ^= 1
        into = [memoryview(bytearray(len(slot))) for slot in slots]
        tried = [memoryview(moved), *slots[1:-1], memoryview(damaged)]
        is_found = found.copy_proving(tried, into, headers) == count - 1
    finally:
        os.close(fd)
    return is_sealed and is_read and is_found and list(map(bytes, slots)) == wanted and in_file == b"".join(wanted)


def path_word() -> str:
    """Which way this process goes: `native` or `python`."""
    return "python" if library() is None else "native"


def payload_checksums(buffers: Sequence[memoryview], skip: int, payload_bytes: Sequence[int]) -> list[int]:
    """The checksum of each buffer's payload: so many bytes of it, behind its first `skip`."""
    found = library()
    if found is not None:
        try:
            return list(_with_short(found.checksums(buffers, skip, payload_bytes), buffers, skip, payload_bytes))
        except UnreachableError:
            pass  # the other way looks where a buffer ends
    return [checksum(buffer[skip : skip + n]) for buffer, n in zip(buffers, payload_bytes, strict=True)]


def copied(
    buffers: Sequence[memoryview], into: Sequence[memoryview], skip: int, payload_bytes: Sequence[int]
) -> list[int]:
    """Copy each of `buffers` into its own of `into`; the checksum of each payload where it is now."""
    found = library()
    if found is not None:
        try:
            return found.copy(buffers, into, skip, payload_bytes)
        except UnreachableError:
            pass
    _copy(buffers, into)
    return payload_checksums(into, skip, payload_bytes)


def copied_proving(buffers: Sequence[memoryview], into: Sequence[memoryview], headers: Headers) -> int:
    """Copy each of `buffers` into its own of `into`; how many, from the first on, are proved to say what they must.

    0 without the library: they are then for Python to look at.
    """
    found = library()
    if found is not None:
        try:
            return found.copy_proving(buffers, into, headers)
        except UnreachableError:
            pass
    _copy(buffers, into)
    return 0


def _copy(buffers: Sequence[memoryview], into: Sequence[memoryview]) -> None:
    for one, other in zip(buffers, into, strict=True):
        np.copyto(np.frombuffer(other[: len(one)], np.uint8), np.frombuffer(one, np.uint8))  # lets other threads run


def _with_short(
    sums: Sequence[int], buffers: Sequence[memoryview], skip: int, payload_bytes: Sequence[int]
) -> Sequence[int]:
    """These, with what the library leaves out: the checksums of short payloads. Few objects end in one."""
    if isinstance(payload_bytes, Sizes) and min(payload_bytes.each, payload_bytes.last) >= INPUT_BYTES_MIN:
        return sums
    mended = list(sums)
    for number, count in enumerate(payload_bytes):
        if count < INPUT_BYTES_MIN:
            mended[number] = checksum(buffers[number][skip : skip + count])
    return mended


def _words_of(headers: Headers, count: int) -> tuple[bytes, bytes, int]:
    """What the library is told of the headers of so many slots."""
    step_bytes = headers.step_bytes
    assert len(headers.templates) == (step_bytes * count or HEADER_BYTES), "the library would reach beyond them"
    return SLOT_HEADER_FORM, headers.templates, step_bytes


def _places(buffers: Sequence[memoryview], skip: int, payload_bytes: Sequence[int]) -> tuple[bytes, Sequence[int]]:
    """Where each buffer begins, as the library takes numbers, and its bytes.

    UnreachableError for one that ends before its payload: so many bytes, behind the first `skip`.
    """
    if isinstance(buffers, Slots):
        sizes = buffers.sizes
        if sizes.hold(skip, payload_bytes):
            return buffers.addresses(), sizes
        raise UnreachableError(f"{list(payload_bytes)} bytes behind the first {skip} of {list(sizes)}")
    for buffer, count in zip(buffers, payload_bytes, strict=True):
        if buffer.nbytes - skip < count:
            raise UnreachableError(f"{count} bytes behind the first {skip} of {buffer.nbytes}")
    byte, address = ctypes.c_char.from_buffer, ctypes.addressof
    try:
        return _packed([address(byte(buffer)) for buffer in buffers]), [buffer.nbytes for buffer in buffers]
    except (TypeError, ValueError) as error:  # read only; empty
        raise UnreachableError(str(error)) from error


def _packed(numbers: Sequence[int]) -> bytes:
    return numbers.packed() if isinstance(numbers, Sizes) else struct.pack(f"={len(numbers)}Q", *numbers)
