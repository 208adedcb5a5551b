"""Checksums of many payloads in one call, and copies with them: by the optional library, or by Python without it.

Owns: finding and proving the library (packages/xkv-store/native/xkv.c), calling it, and the way without it.
Must not know: what a slot's header says, files, or what an error is good for. Thread-safe.

The library gives what python-xxhash gives, bit for bit; why it exists is in ADR 0018. A call lets other threads have
the interpreter once, however many payloads there are.
"""

import ctypes
import errno
import logging
import os
import struct
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np

from .layout import checksum

log = logging.getLogger(__name__)

ENVIRONMENT_NAME: Final = "XKV_NATIVE"  # "0": the library is not used though it is there
LIBRARY: Final = Path(__file__).with_name("libxkv.so.1")  # its number is another when a call of it is
INPUT_BYTES_MIN: Final = 241  # shorter ones are Python's
_ELF_HEADER: Final = struct.Struct("<40xQ10xHH2x")  # where its last table begins, the bytes of an entry, entries
_PROVED_BYTES: Final = (241, 1_023, 1_024, 1_025, 2_048, 2_049, 5_000)  # ends in, at and behind a block of 1,024 bytes


class UnreachableError(ValueError):
    """Memory that must not be reached by its address: read only, or less than what is asked of it."""


class Native:
    """The library's functions, for memory that whoever calls holds. UnreachableError."""

    def __init__(self, path: Path) -> None:
        """OSError where it cannot be loaded, AttributeError where it is another library."""
        _check_whole(path)
        library = ctypes.CDLL(str(path))
        self._checksums = library.xkv_checksums
        self._checksums.argtypes = (ctypes.c_size_t, ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint64))
        self._checksums.restype = None
        self._read = library.xkv_read
        self._read.argtypes = (
            *(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t),
            *(ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint64)),
        )
        self._read.restype = ctypes.c_int
        self._copy = library.xkv_copy
        self._copy.argtypes = (
            *(ctypes.c_uint64, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p),
            ctypes.POINTER(ctypes.c_uint64),
        )
        self._copy.restype = None
        self._in_memory = library.xkv_in_memory
        self._in_memory.argtypes, self._in_memory.restype = (ctypes.c_int,), ctypes.c_int

    def in_memory(self, fd: int) -> bool:
        """Whether a file is on a tmpfs, where a read with O_DIRECT is a copy through the core's cache all the same."""
        return bool(self._in_memory(fd))

    def checksums(self, buffers: Sequence[memoryview], skip: int, payload_bytes: Sequence[int]) -> list[int]:
        """See `payload_checksums`; what is too short for the library is 0."""
        count = len(buffers)
        sums = (ctypes.c_uint64 * count)()
        self._checksums(count, _addresses(buffers, skip, payload_bytes), _packed(count, payload_bytes), sums)
        return sums[:]

    def copy(
        self, buffers: Sequence[memoryview], into: Sequence[memoryview], skip: int, payload_bytes: Sequence[int]
    ) -> list[int]:
        """See `copied`."""
        count, lengths = len(buffers), [len(buffer) for buffer in buffers]
        if any(skip + n > length for n, length in zip(payload_bytes, lengths, strict=True)):
            raise UnreachableError("a payload that ends behind its buffer")
        sums = (ctypes.c_uint64 * count)()
        places = _addresses(buffers, 0, lengths), _addresses(into, 0, lengths)
        self._copy(skip, count, *places, _packed(count, lengths), _packed(count, payload_bytes), sums)
        return _with_short(sums[:], into, skip, payload_bytes)

    def read(
        self,
        fd: int,
        offset: int,
        buffers: Sequence[memoryview],
        skip: int,
        payload_bytes: Sequence[int],
        *,
        step_bytes: int,
    ) -> list[int] | None:
        """Read what lies one behind the other from `offset` on, at most `step_bytes` in a call, and sum it meanwhile.

        None where a call moved less than it should: then everything is to be read anew. OSError.
        """
        count = len(buffers)
        addresses = _addresses(buffers, 0, [skip + n for n in payload_bytes])
        sums = (ctypes.c_uint64 * count)()
        whole, summed = _packed(count, map(len, buffers)), _packed(count, payload_bytes)
        code: int = self._read(fd, offset, step_bytes, skip, count, addresses, whole, summed, sums)
        if code < 0 and -code != errno.EINTR:
            raise OSError(-code, os.strerror(-code))
        return None if code else _with_short(sums[:], buffers, skip, payload_bytes)


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
    sample = bytearray(number * number * 13 >> 3 & 255 for number in range(max(_PROVED_BYTES) + 1))
    buffers = [memoryview(sample)] * len(_PROVED_BYTES)
    wanted = [checksum(memoryview(sample)[1 : 1 + n]) for n in _PROVED_BYTES]
    into = [memoryview(bytearray(len(sample))) for _ in buffers]
    is_right = found.checksums(buffers, 1, _PROVED_BYTES) == found.copy(buffers, into, 1, _PROVED_BYTES) == wanted
    if not is_right or into != buffers:
        log.warning("%s is not used: its checksums are wrong", LIBRARY)
        return None
    return found


def path_word() -> str:
    """Which way this process goes: `native` or `python`."""
    return "python" if library() is None else "native"


def payload_checksums(buffers: Sequence[memoryview], skip: int, payload_bytes: Sequence[int]) -> list[int]:
    """The checksum of each buffer's payload: so many bytes of it, behind its first `skip`."""
    found = library()
    if found is not None:
        try:
            return _with_short(found.checksums(buffers, skip, payload_bytes), buffers, skip, payload_bytes)
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
    for one, other in zip(buffers, into, strict=True):
        np.copyto(np.frombuffer(other[: len(one)], np.uint8), np.frombuffer(one, np.uint8))  # lets other threads run
    return payload_checksums(into, skip, payload_bytes)


def _with_short(sums: list[int], buffers: Sequence[memoryview], skip: int, payload_bytes: Sequence[int]) -> list[int]:
    """These, with what the library leaves out: the checksums of short payloads. Few objects end in one."""
    for number, count in enumerate(payload_bytes):
        if count < INPUT_BYTES_MIN:
            sums[number] = checksum(buffers[number][skip : skip + count])
    return sums


def _addresses(buffers: Sequence[memoryview], skip: int, payload_bytes: Sequence[int]) -> bytes:
    """Where each payload begins, as the library takes numbers. UnreachableError."""
    for buffer, count in zip(buffers, payload_bytes, strict=True):
        if buffer.nbytes - skip < count:
            raise UnreachableError(f"{count} bytes behind the first {skip} of {buffer.nbytes}")
    byte, address = ctypes.c_char.from_buffer, ctypes.addressof
    try:
        return _packed(len(buffers), [address(byte(buffer)) + skip for buffer in buffers])
    except (TypeError, ValueError) as error:  # read only; empty
        raise UnreachableError(str(error)) from error


def _packed(count: int, numbers: Iterable[int]) -> bytes:
    return struct.pack(f"={count}Q", *numbers)
