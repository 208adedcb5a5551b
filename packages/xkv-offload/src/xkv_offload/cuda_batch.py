"""The driver's batched copies: many runs of bytes between GPU and host memory in one call.

Owns: finding `cuMemcpyBatchAsync` in the driver that torch has loaded, and calling it. Nothing is linked: where there
is no such driver or function, `find` says so, and copies are made one by one.
Must not know: torch, slots, jobs, what is copied.

Signature, structures and rules are those of cuda.h and cudaTypedefs.h (PFN_cuMemcpyBatchAsync_v12080): the function
came with CUDA 12.8; in 13.0 another one has its name, without the index of the copy that failed. A driver gives out the
one of the version that it is asked for, so that of 12.8 is asked for, whatever the driver is.
"""

import ctypes
import logging
from array import array
from collections.abc import Sequence
from typing import Any, Final

logger = logging.getLogger(__name__)

LIBRARY: Final = "libcuda.so.1"
FUNCTION: Final = b"cuMemcpyBatchAsync"
CUDA_VERSION: Final = 12_080  # 1000 * major + 10 * minor
SUCCESS: Final = 0  # CUDA_SUCCESS
STREAM_ORDER: Final = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: a source is read when the stream has come there
BESIDE_KERNELS: Final = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE: by the copy engines, not multiprocessors
_WORD_BYTES: Final = 8


class RefusedError(Exception):
    """The driver has no such call, or did not take this one."""


class Location(ctypes.Structure):
    """CUmemLocation_st: 8 bytes. A hint that is ignored for memory that the GPU owns or that is registered."""

    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class Attributes(ctypes.Structure):
    """CUmemcpyAttributes_st: 24 bytes."""

    _fields_ = (
        ("source_order", ctypes.c_uint),
        ("source", Location),
        ("into", Location),
        ("flags", ctypes.c_uint),
    )


Copy: Final = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,  # where to, `count` addresses
    ctypes.c_void_p,  # where from
    ctypes.c_void_p,  # bytes
    ctypes.c_size_t,  # count
    ctypes.POINTER(Attributes),
    ctypes.POINTER(ctypes.c_size_t),  # the first copy that each attributes are for
    ctypes.c_size_t,  # how many attributes there are
    ctypes.POINTER(ctypes.c_size_t),  # filled with the copy that failed
    ctypes.c_void_p,  # stream; the legacy default stream is refused
)
"""Called without the interpreter's lock: what a wave copies is queued in some tens of microseconds."""


class BatchedCopies:
    """`cuMemcpyBatchAsync` in the CUDA context of the thread that makes this; any thread may copy.

    `driver`'s functions are called with the interpreter's lock held, being short. RefusedError; AttributeError where it
    is a driver from before CUDA 12.
    """

    def __init__(self, driver: Any, *, flags: int = BESIDE_KERNELS) -> None:
        self._push = _function(driver.cuCtxPushCurrent_v2, ctypes.c_void_p)
        self._pop = _function(driver.cuCtxPopCurrent_v2, ctypes.POINTER(ctypes.c_void_p))
        current = _function(driver.cuCtxGetCurrent, ctypes.POINTER(ctypes.c_void_p))
        look_up = _function(
            driver.cuGetProcAddress_v2,
            ctypes.c_char_p,
            ctypes.POINTER(ctypes.c_void_p),
            ctypes.c_int,
            ctypes.c_uint64,
            ctypes.POINTER(ctypes.c_int),
        )
        address, status = ctypes.c_void_p(), ctypes.c_int()
        _check(look_up(FUNCTION, ctypes.byref(address), CUDA_VERSION, 0, ctypes.byref(status)), "its lookup")
        if not address.value:
            raise RefusedError(f"it has no {FUNCTION.decode()} (status {status.value})")
        self._copy = Copy(address.value)
        self._context = ctypes.c_void_p()
        _check(current(ctypes.byref(self._context)), "the context's lookup")
        if not self._context.value:
            raise RefusedError("this thread has no context")
        self._attributes = Attributes(source_order=STREAM_ORDER, flags=flags)

    def copy(self, stream: int, into: Sequence[int], sources: Sequence[int], sizes: Sequence[int]) -> None:
        """Queue copies between addresses on a stream's raw handle, at least one. Among them there is no order.

        RefusedError: some of them may have been queued all the same.
        """
        count = len(sizes)
        words = array("Q", (*into, *sources, *sizes))  # read before the call returns
        at, _ = words.buffer_info()
        places = (at, at + _WORD_BYTES * count, at + 2 * _WORD_BYTES * count)
        first, failed, popped = ctypes.c_size_t(0), ctypes.c_size_t(), ctypes.c_void_p()
        _check(self._push(self._context), "its context")
        try:
            status = self._copy(*places, count, self._attributes, first, 1, failed, stream)
        finally:
            self._pop(ctypes.byref(popped))
        _check(status, f"copy {failed.value} of {count}")


def find() -> BatchedCopies | None:
    """The driver's batched copies in this thread's context, None where it has none."""
    try:
        return BatchedCopies(ctypes.PyDLL(LIBRARY))
    except (OSError, AttributeError, RefusedError) as error:
        logger.info("xkv: copies between GPU and ring are queued one by one: the driver has no batches (%s)", error)
        return None


def _function(found: Any, *arguments: Any) -> Any:
    found.argtypes, found.restype = arguments, ctypes.c_int
    return found


def _check(status: int, what: str) -> None:
    if status != SUCCESS:
        raise RefusedError(f"the driver refused {what} (error {status})")
