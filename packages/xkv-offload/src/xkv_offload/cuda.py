"""CUDA, as torch gives it: memory, streams, events, and host memory that the GPU reaches directly.

Owns: every call into torch.cuda. Must not know: what is copied, slots, jobs. Imported only where tensors lie on a GPU.
"""

import logging
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from .copy import Bytes
from .staging_area import Event, Work

logger = logging.getLogger(__name__)

URGENT_PRIORITY: Final = -1  # lower is sooner; vLLM's own stream has 0
PLAIN_PRIORITY: Final = 0  # as low as there is
_CLEARING_BYTES: Final = 8


class CudaDevice:
    """One GPU. `mark` runs on vLLM's thread, the rest at start-up or on the copy thread."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._registered: list[Bytes] = []

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
        with torch.cuda.stream(stream):
            work()

    def await_all(self) -> None:
        """See Device."""
        torch.cuda.synchronize(self._device)

    def register(self, parts: Sequence[Bytes]) -> None:
        """See Device. Pinning takes the memory at once, page by page."""
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
                    self._clear_error()
                    return
                self._registered.append(part)

    def _clear_error(self) -> None:
        """CUDA remembers a refusal until somebody asks: the next launch does, and would take it for its own."""
        try:
            torch.zeros(_CLEARING_BYTES, dtype=torch.int8, device=self._device)
        except RuntimeError as error:
            logger.debug("the refusal was still there: %s", error)
        torch.zeros(_CLEARING_BYTES, dtype=torch.int8, device=self._device)

    def unregister(self) -> None:
        """See Device."""
        runtime = torch.cuda.cudart()
        with torch.cuda.device(self._device):
            while self._registered:
                runtime.cudaHostUnregister(self._registered.pop().ctypes.data)
