"""CUDA, as torch gives it: memory, streams, events, copies, and host memory that the GPU reaches directly.

Owns: every call into torch.cuda; whether copies go in batches (cuda_batch) or one by one.
Must not know: what is copied, slots, jobs. Imported only where tensors lie on a GPU.
"""

import logging
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from . import cuda_batch
from .copy import Bytes
from .cuda_batch import BatchedCopies, RefusedError
from .staging_area import Copies, Event, Work

logger = logging.getLogger(__name__)

URGENT_PRIORITY: Final = -1  # lower is sooner; vLLM's own stream has 0
PLAIN_PRIORITY: Final = 0  # as low as there is
_CLEARING_BYTES: Final = 8


class _Thread(threading.local):
    """What is so on one thread: whether it made the device, else the stream that was set there last."""

    is_maker = False
    stream: Any = None


class CudaDevice:
    """One GPU. `mark` runs on vLLM's thread, the rest at start-up, on the thread that makes this, or on the copy
    thread, which does nothing else with any GPU: its stream stays as it was set for the last piece of work.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._registered: list[Bytes] = []
        weakref.finalize(self, _give_back, self._registered, device).atexit = False
        self._thread = _Thread()
        self._thread.is_maker = True
        self._batches: BatchedCopies | None = None

    def use_batches(self) -> bool:
        """Copy in batches from now on, where the driver has them."""
        with torch.cuda.device(self._device):
            self.zeros(_CLEARING_BYTES)  # a context is a thread's with its first piece of work
            self._batches = cuda_batch.find()
        return self._batches is not None

    def use_no_batches(self) -> None:
        """Copy one by one from now on."""
        self._batches = None

    def zeros(self, size_bytes: int) -> Any:
        """See Device."""
        return torch.zeros(size_bytes, dtype=torch.int8, device=self._device)

    def pinned_words(self, count: int) -> Any:
        """See Device."""
        return torch.zeros(count, dtype=torch.int64, pin_memory=True)

    def host_bytes(self, array: Bytes) -> Any:
        """See Device."""
        return torch.from_numpy(array.reshape(-1).view(np.int8))

    def stream(self, *, urgent: bool) -> Any:
        """See Device."""
        return torch.cuda.Stream(self._device, priority=URGENT_PRIORITY if urgent else PLAIN_PRIORITY)

    def event(self) -> Event:
        """See Device."""
        made: Event = torch.cuda.Event(blocking=True)
        return made

    def mark(self) -> object:
        """See Device."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def enqueue(self, stream: Any, work: Work) -> None:
        """See Device."""
        thread = self._thread
        if thread.is_maker:
            with torch.cuda.stream(stream):
                work()
            return
        if thread.stream is not stream:
            torch.cuda.set_stream(stream)  # and the device
            thread.stream = stream
        work()

    def copy(self, stream: Any, copies: Sequence[Copies], *, into_device: bool) -> None:
        """See Device."""
        if self._batches is not None:
            try:
                _copy_batch(self._batches, stream.cuda_stream, copies, into_device=into_device)
            except RefusedError as error:
                logger.warning("xkv: copies between GPU and ring are queued one by one from now on: %s", error)
                self._batches = None
            else:
                return
        self.enqueue(stream, partial(_copy_one_by_one, copies, into_device=into_device))

    def await_all(self) -> None:
        """See Device."""
        torch.cuda.synchronize(self._device)

    def register(self, parts: Sequence[Bytes]) -> None:
        """See Device. Pinning takes the memory at once, page by page. However this device ends, it gives it back."""
        runtime = torch.cuda.cudart()
        with torch.cuda.device(self._device):
            for part in parts:
                status = int(runtime.cudaHostRegister(part.ctypes.data, part.nbytes, 0))
                if status != 0:
                    logger.warning(
                        "xkv: CUDA does not register the ring (error %d after %d of %d bytes): copies go through the "
                        "driver's own buffers, several times slower; is locked memory limited (ulimit -l)?",
                        status,
                        sum(one.nbytes for one in self._registered),
                        sum(one.nbytes for one in parts),
                    )
                    _clear_error(self._device)
                    self._batches = None  # not for memory that CUDA does not know, or knows in parts
                    return
                self._registered.append(part)

    def unregister(self) -> None:
        """See Device."""
        self._batches = None
        _give_back(self._registered, self._device)


def _give_back(registered: list[Bytes], device: Any) -> None:
    """Before its memory is unmapped: CUDA would take what is mapped there next for the same pages."""
    if not registered:
        return
    runtime = torch.cuda.cudart()
    with torch.cuda.device(device):
        while registered:
            part = registered.pop()
            status = int(runtime.cudaHostUnregister(part.ctypes.data))
            if status != 0:
                logger.warning("xkv: CUDA does not give %d bytes of the ring back (error %d)", part.nbytes, status)
                with suppress(RuntimeError):  # where the device is lost, all its calls fail
                    _clear_error(device)


def _clear_error(device: Any) -> None:
    """CUDA remembers a refusal until somebody asks: the next launch does, and would take it for its own."""
    try:
        torch.zeros(_CLEARING_BYTES, dtype=torch.int8, device=device)
    except RuntimeError as error:
        logger.debug("the refusal was still there: %s", error)
    torch.zeros(_CLEARING_BYTES, dtype=torch.int8, device=device)


def _copy_batch(batches: BatchedCopies, stream: int, copies: Sequence[Copies], *, into_device: bool) -> None:
    staged: list[int] = []
    host: list[int] = []
    sizes: list[int] = []
    for one in copies:
        if one.runs:
            staged_base, host_base = one.staged.data_ptr(), one.host.data_ptr()
            staged += [staged_base + run.staged_at for run in one.runs]
            host += [host_base + run.ring_at for run in one.runs]
            sizes += [run.length for run in one.runs]
    if sizes:
        into, sources = (staged, host) if into_device else (host, staged)
        batches.copy(stream, into, sources, sizes)


def _copy_one_by_one(copies: Sequence[Copies], *, into_device: bool) -> None:
    for one in copies:
        for run in one.runs:
            staged = one.staged[run.staged_at : run.staged_at + run.length]
            host = one.host[run.ring_at : run.ring_at + run.length]
            into, source = (staged, host) if into_device else (host, staged)
            into.copy_(source, non_blocking=True)
