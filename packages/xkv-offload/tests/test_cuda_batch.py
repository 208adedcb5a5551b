"""The driver's batched copies, with a driver of the tests' own that is called through the C interface.

`FakeDriver` reads the arrays and structures as cuda.h defines them, from raw memory, and copies between the addresses;
the "GPU" is host memory. No GPU, no CUDA.
"""

import ctypes
import struct
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from xkv_offload import cuda, cuda_batch, device_setup
from xkv_offload.cuda import CudaDevice
from xkv_offload.cuda_batch import Attributes, BatchedCopies, Location, RefusedError
from xkv_offload.rows import Run
from xkv_offload.staging_area import Copies

CONTEXT = 0xC0FFEE
STREAM = 77
NOT_READY = 600


def words_at(address: int, count: int) -> tuple[int, ...]:
    return struct.unpack(f"<{count}Q", ctypes.string_at(address, 8 * count))


class FakeDriver:
    """The functions of libcuda.so.1. `status`: what a batch answers; `spoils`: which batch copies too few bytes."""

    def __init__(self, *, has_function: bool = True, context: int = CONTEXT, lookup_status: int = 0) -> None:
        self.status = 0
        self.spoils = 0
        self.contexts: list[int] = []
        self.calls: list[dict[str, Any]] = []
        self.asked: list[tuple[bytes, int, int]] = []
        # the signature as in cudaTypedefs.h, PFN_cuMemcpyBatchAsync_v12080, with raw addresses for all pointers
        word, size = ctypes.c_void_p, ctypes.c_size_t
        self._batch = ctypes.CFUNCTYPE(ctypes.c_int, word, word, word, size, word, word, size, word, word)(self._copy)
        address = ctypes.cast(self._batch, ctypes.c_void_p).value if has_function else None

        def look_up(name: bytes, found: Any, version: int, flags: int, status: Any) -> int:
            self.asked.append((name, version, flags))
            found[0], status[0] = address, 0 if has_function else 1
            return lookup_status

        def current(found: Any) -> int:
            found[0] = context
            return 0

        def push(pushed: int) -> int:
            self.contexts.append(pushed)
            return 0

        def pop(found: Any) -> int:
            found[0] = self.contexts.pop()
            return 0

        pointer = ctypes.POINTER(ctypes.c_void_p)
        self.cuGetProcAddress_v2 = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_char_p, pointer, ctypes.c_int, ctypes.c_uint64, ctypes.POINTER(ctypes.c_int)
        )(look_up)
        self.cuCtxGetCurrent = ctypes.CFUNCTYPE(ctypes.c_int, pointer)(current)
        self.cuCtxPushCurrent_v2 = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(push)
        self.cuCtxPopCurrent_v2 = ctypes.CFUNCTYPE(ctypes.c_int, pointer)(pop)

    def _copy(  # noqa: PLR0917 - the driver's signature
        self,
        into: int,
        sources: int,
        sizes: int,
        count: int,
        attributes: int,
        firsts: int,
        attributes_count: int,
        failed: int,
        stream: int,
    ) -> int:
        order, source_type, source_id, into_type, into_id, flags = struct.unpack(
            "<IIiIiI", ctypes.string_at(attributes, 24)
        )
        call = {
            "copies": list(zip(words_at(into, count), words_at(sources, count), words_at(sizes, count), strict=True)),
            "order": order,
            "hints": (source_type, source_id, into_type, into_id),
            "flags": flags,
            "firsts": words_at(firsts, attributes_count),
            "stream": stream,
            "contexts": list(self.contexts),
            "thread": threading.get_ident(),
        }
        self.calls.append(call)
        if self.status:
            ctypes.memmove(failed, struct.pack("<Q", 1), 8)
            return self.status
        for to, source, length in call["copies"]:
            ctypes.memmove(to, source, length - (len(self.calls) == self.spoils))
        return 0


class FakeStream:
    cuda_stream = STREAM


class NoEvent:
    def record(self, stream: object) -> None:
        """Everything has been copied in its call."""

    def synchronize(self) -> None:
        """As record."""


class Device(CudaDevice):
    """Of the real one: whether copies go in batches, and both ways of copying. Its memory is the host's."""

    def __init__(self, driver: FakeDriver | None) -> None:
        super().__init__(torch.device("cpu"))
        self.driver = driver
        self.singly = 0

    def use_batches(self) -> bool:
        try:
            self._batches = None if self.driver is None else BatchedCopies(self.driver)
        except RefusedError:
            self._batches = None
        return self._batches is not None

    def zeros(self, size_bytes: int) -> Any:
        return torch.zeros(size_bytes, dtype=torch.int8)

    def pinned_words(self, count: int) -> Any:
        return torch.zeros(count, dtype=torch.int64)

    def stream(self, *, urgent: bool) -> Any:
        return FakeStream()

    def event(self) -> Any:
        return NoEvent()

    def await_all(self) -> None:
        """Nothing is under way."""

    def enqueue(self, stream: Any, work: Any) -> None:
        self.singly += 1
        work()


def copies_of(runs: Sequence[Run]) -> Copies:
    return Copies(torch.arange(1_000).to(torch.int8), torch.arange(1_000, 2_000).to(torch.int8), runs)


def test_the_structures_are_those_of_the_header() -> None:
    assert ctypes.sizeof(Location) == 8
    assert (Location.type.offset, Location.id.offset) == (0, 4)
    assert ctypes.sizeof(Attributes) == 24
    fields = (Attributes.source_order, Attributes.source, Attributes.into, Attributes.flags)
    assert [field.offset for field in fields] == [0, 4, 12, 20]
    assert ctypes.sizeof(ctypes.c_size_t) == 8


def test_a_batch_is_one_call_in_the_context_in_which_it_was_found() -> None:
    driver = FakeDriver()
    batches = BatchedCopies(driver)
    assert driver.asked == [(b"cuMemcpyBatchAsync", 12_080, 0)]
    source = np.arange(64, dtype=np.uint8)
    into = np.zeros(64, np.uint8)
    at, to = source.ctypes.data, into.ctypes.data
    batches.copy(1 << 40, [to + 3, to + 40], [at + 10, at + 1], [5, 20])
    (call,) = driver.calls
    assert call.pop("thread") == threading.get_ident()
    assert call == {
        "copies": [(to + 3, at + 10, 5), (to + 40, at + 1, 20)],
        "order": 1,
        "hints": (0, 0, 0, 0),
        "flags": 1,
        "firsts": (0,),
        "stream": 1 << 40,
        "contexts": [CONTEXT],
    }
    assert driver.contexts == [], "the thread's own context is back"
    expected = np.zeros(64, np.uint8)
    expected[3:8], expected[40:60] = source[10:15], source[1:21]
    assert (into == expected).all()
    driver.status = NOT_READY
    with pytest.raises(RefusedError, match=r"copy 1 of 2 \(error 600\)"):
        batches.copy(STREAM, [to, to], [at, at], [1, 1])
    assert driver.contexts == []


def test_a_driver_without_batches_is_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RefusedError, match="has no cuMemcpyBatchAsync"):
        BatchedCopies(FakeDriver(has_function=False))
    with pytest.raises(RefusedError, match=r"lookup \(error 1\)"):
        BatchedCopies(FakeDriver(lookup_status=1))
    with pytest.raises(RefusedError, match="no context"):
        BatchedCopies(FakeDriver(context=0))
    caplog.set_level("INFO")
    monkeypatch.setattr(cuda_batch, "LIBRARY", "libthere-is-none.so.1")
    assert cuda_batch.find() is None
    assert "one by one" in caplog.text
    monkeypatch.setattr(cuda_batch, "LIBRARY", "libc.so.6")  # a library without these functions
    assert cuda_batch.find() is None


@pytest.mark.parametrize("into_device", [True, False])
@pytest.mark.parametrize("driver", [FakeDriver(), None])
def test_both_ways_copy_the_same_bytes(driver: FakeDriver | None, into_device: bool) -> None:
    device = Device(driver)
    device.use_batches()
    one, other = copies_of((Run(0, 900, 100), Run(500, 3, 7))), copies_of((Run(1, 2, 3),))
    nothing = copies_of(())
    expected = []
    for copies in (one, nothing, other):
        staged, host = copies.staged.clone(), copies.host.clone()
        for run in copies.runs:
            places = staged[run.staged_at : run.staged_at + run.length], host[run.ring_at : run.ring_at + run.length]
            (places[0] if into_device else places[1])[:] = places[1] if into_device else places[0]
        expected.append((staged, host))
    device.copy(FakeStream(), (one, nothing, other), into_device=into_device)
    for copies, (staged, host) in zip((one, nothing, other), expected, strict=True):
        assert torch.equal(copies.staged, staged)
        assert torch.equal(copies.host, host)
    if driver is not None:
        assert [len(call["copies"]) for call in driver.calls] == [3] * len(driver.calls)
        assert driver.calls[-1]["stream"] == STREAM
        device.copy(FakeStream(), (nothing,), into_device=into_device)
        assert driver.calls[-1]["copies"], "a batch of nothing is refused, and not made"
    assert device.singly == (driver is None)


def test_a_batch_that_is_refused_is_copied_one_by_one_and_so_is_all_that_follows(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = FakeDriver()
    device = Device(driver)
    assert device.use_batches()
    driver.status = NOT_READY
    for _ in range(2):
        copies = copies_of((Run(0, 900, 100), Run(500, 3, 7)))
        device.copy(FakeStream(), (copies,), into_device=True)
        assert torch.equal(copies.staged[:100], copies.host[900:])
        assert torch.equal(copies.staged[500:507], copies.host[3:10])
    assert len(driver.calls) == 1
    assert device.singly == 2
    assert caplog.text.count("error 600") == 1


def test_batches_are_proved_before_they_are_used(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(Device):
        def use_batches(self) -> bool:
            super().use_batches()
            raise TypeError("the driver answers with something else")

    drivers = [FakeDriver() for _ in range(3)]
    good, bad, worse = map(Device, drivers)
    drivers[1].spoils, drivers[2].spoils = 1, 2
    all_of_them = [good, bad, worse, Device(None), Odd(FakeDriver())]
    for device in all_of_them:
        device_setup.choose_copies(device)
    assert [device._batches is not None for device in all_of_them] == [True, False, False, False, False]
    assert good.driver is not None
    there, back = (call["copies"] for call in good.driver.calls)
    assert len(there) == 3
    assert [(source, into, size) for into, source, size in there] == back
    assert caplog.text.count("did not copy") == 2, "one on the way there, one on the way back"
    assert good.singly == 0


def test_memory_that_cuda_did_not_register_is_copied_one_by_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Runtime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802 - as it is there
            return 0 if not registered else 1

        def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - as it is there
            return 0

    registered: list[bool] = []
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    device = Device(FakeDriver())
    monkeypatch.setattr(cuda, "_clear_error", lambda _: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
    assert device.use_batches()
    in_batches = []
    for _ in range(2):
        device.register([np.zeros(4_096, np.uint8)])
        in_batches.append(device._batches is not None)
        registered.append(True)
    assert in_batches == [True, False]
    assert device.use_batches()
    device.unregister()
    in_batches.append(device._batches is not None)
    assert not in_batches[-1], "nothing is registered any more"
    assert "does not register" in caplog.text


def test_a_threads_stream_is_set_once_for_all_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[object] = []
    within: list[object] = []

    class Within:
        def __init__(self, stream: object) -> None:
            self._stream = stream

        def __enter__(self) -> None:
            within.append(self._stream)

        def __exit__(self, *_: object) -> None:
            within.remove(self._stream)

    monkeypatch.setattr(torch.cuda, "set_stream", set_to.append)
    monkeypatch.setattr(torch.cuda, "stream", Within)
    device = CudaDevice(torch.device("cpu"))
    seen: list[list[object]] = []
    for stream in ("a", "a", "b"):
        device.enqueue(stream, lambda: seen.append(list(within)))
    assert seen == [["a"], ["a"], ["b"]], "whoever makes it has the stream of its own again"
    assert set_to == []

    def work() -> None:
        for stream in ("a", "a", "b", "b", "a"):
            device.enqueue(stream, lambda: seen.append(list(set_to)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen[3:] == [["a"], ["a"], ["a", "b"], ["a", "b"], ["a", "b", "a"]]
