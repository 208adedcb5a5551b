"""The GPU scripts on a machine without a GPU: every part of them runs, small, on a GPU of host memory.

Owns: that pretence, so that a lent GPU's minutes are not spent on a script's mistake. Its figures mean nothing; bytes
are copied and compared all the same, kernels by their plans. Must not know: vLLM, what is measured.

    python bench/gpu_dry.py [FOLDER] [--parts check,kernels,batches,copies,beside,jobs]     (three minutes, 3 GB)
"""

import ctypes
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from xkv_offload import copy, copy_triton, cuda_batch, device_setup
from xkv_offload.rows import PIECE_WORDS, ROW_WORDS, Written
from xkv_offload.staging_area import StagingSlot

SIDE_MAX = 64  # of what a script multiplies
ELEMENTS_MAX = 512 << 20  # of what it copies about
KV_BYTES = 1100 << 20  # jobs of 32 chunks of 32 MiB, and a block that is nobody's
RING_BYTES_MAX = 512 << 20
JOB_BYTES = 200_000_000
REGISTERED_ALREADY = 712


class Event:
    """What was queued has been done in the call that queued it."""

    def __init__(self, **_: bool) -> None:
        self.at = 0.0

    def record(self, _: Any = None) -> None:
        """Now."""
        self.at = time.perf_counter()

    def query(self) -> bool:
        """It is long since."""
        return True

    def synchronize(self) -> None:
        """As query."""

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds, some in any case."""
        return max(1e-3, 1e3 * (end.at - self.at))


class Stream:
    """All work is done in its call."""

    cuda_stream = 1

    def __init__(self, *_: Any, **__: Any) -> None:
        """There is nothing to make."""

    def wait_event(self, event: Event) -> None:
        """It has been reached."""

    def synchronize(self) -> None:
        """As wait_event."""


class Graph:
    """What is captured has run."""

    def replay(self) -> None:
        """Once is enough here."""


class Runtime:
    """Registers everything, but nothing twice."""

    def __init__(self) -> None:
        self._known: set[int] = set()

    def cudaHostRegister(self, address: int, _size: int, _flags: int) -> int:  # noqa: N802 - as it is there
        """0, or an error."""
        status = REGISTERED_ALREADY if address in self._known else 0
        self._known.add(address)
        return status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - as it is there
        """KeyError where it is not registered: a fault of ours."""
        self._known.remove(address)
        return 0


class Batches:
    """The driver's batched copies."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """No driver is asked."""

    def copy(self, stream: int, into: Sequence[int], sources: Sequence[int], sizes: Sequence[int]) -> None:
        """All of them, now."""
        assert stream, "the legacy default stream is refused"
        for to, source, size in zip(into, sources, sizes, strict=True):
            ctypes.memmove(to, source, size)


def copy_rows(_: Any, slot: StagingSlot, written: Written, into_pages: bool) -> None:
    """What the kernel does, from the plan as it came to the GPU."""
    words = slot.words[: written.words].tolist()
    for at in range(0, written.pieces * PIECE_WORDS, PIECE_WORDS):
        row, rows, ids, staged = words[at : at + PIECE_WORDS]
        for place in range(row, row + rows * ROW_WORDS, ROW_WORDS):
            block, address, stride, staged_at, size = words[place : place + ROW_WORDS]
            page = address + words[ids + block] * stride
            into, source = (page, staged + staged_at) if into_pages else (staged + staged_at, page)
            ctypes.memmove(into, source, size)


def on_host(real: Callable[..., Any], *, side_max: int = 0) -> Callable[..., Any]:
    """Make a tensor in host memory, and none that is too large for it."""

    @wraps(real)
    def made(*sizes: Any, device: Any = None, pin_memory: bool = False, **options: Any) -> Any:  # noqa: ARG001
        shrunk = [min(one, side_max) if side_max and isinstance(one, int) else one for one in sizes]
        shrunk = [(ELEMENTS_MAX,) if one == (2 << 30,) else one for one in shrunk]
        return real(*shrunk, **options)

    return made


def pretend() -> None:
    """From now on torch has a GPU."""
    for name in ("zeros", "empty", "full", "randint"):
        setattr(torch, name, on_host(getattr(torch, name)))
    torch.randn = on_host(torch.randn, side_max=SIDE_MAX)
    cuda: Any = torch.cuda
    runtime, stream = Runtime(), Stream()
    of_cuda = {
        "Event": Event,
        "Stream": Stream,
        "CUDAGraph": Graph,
        "graph": lambda _: nullcontext(),
        "device": lambda _: nullcontext(),
        "stream": lambda _: nullcontext(),
        "set_stream": lambda _: None,
        "current_stream": lambda _=None: stream,
        "synchronize": lambda _=None: None,
        "empty_cache": lambda: None,
        "memory_allocated": lambda: 0,
        "get_device_name": lambda: "no GPU",
        "cudart": lambda: runtime,
    }
    for name, one in of_cuda.items():
        setattr(cuda, name, one)
    generator = torch.Generator
    torch.Generator = lambda **_: generator()
    cuda_batch.find = Batches  # type: ignore[assignment]
    cuda_batch.BatchedCopies = Batches  # type: ignore[assignment, misc]
    cuda_batch.LIBRARY = "libc.so.6"  # type: ignore[misc]
    copy_triton.TritonRows._launch = copy_rows  # type: ignore[method-assign, assignment]  # noqa: SLF001 - it is ours
    copy.make_mover = device_setup.make_device_mover


@contextmanager
def small() -> Iterator[Any]:
    """The script, its jobs a fifth as large."""
    import gpu_ceilings  # noqa: PLC0415 - torch has a GPU first

    gpu_ceilings.JOB_BYTES = JOB_BYTES
    gpu_ceilings.REPEATS = 1
    import gpu_check  # noqa: PLC0415 - as above

    gpu_check.STAGING_BYTES = 1 << 27
    attached = gpu_check.attached
    gpu_check.attached = lambda folder, engine, ring_bytes, **options: attached(
        folder, engine, min(ring_bytes, RING_BYTES_MAX), **options
    )
    import gpu_copy  # noqa: PLC0415 - as above

    gpu_copy.KV_BYTES = KV_BYTES
    yield gpu_copy


def main() -> int:
    """As gpu_copy's."""
    words = sys.argv[1:]
    parent = words.pop(0) if words and not words[0].startswith("-") else None
    pretend()
    with small() as script, tempfile.TemporaryDirectory(dir=parent) as folder:
        file = Path(folder) / "figures.json"
        sys.argv = [script.__file__, "--json", str(file), "--memory", folder, "--disk", folder, *words]
        code: int = script.main()
        assert file.stat().st_size, "no figures were written"
    return code


if __name__ == "__main__":
    sys.exit(main())
