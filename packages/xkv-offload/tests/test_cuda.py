"""What torch is asked for where a device is CUDA's, with torch's calls noted: streams, events, registration.

No GPU: if these go, only a run on one shows a refusal that is left behind, or a stream of the wrong priority.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from xkv_offload.cuda import CudaDevice
from xkv_store.ring import Ring

PART_BYTES = 4_096


@dataclass
class Runtime:
    """The CUDA runtime: does not register `refused`, does not give `keeps` back (by number), remembers an error."""

    refused: Sequence[int] = ()
    keeps: Sequence[int] = ()
    asked: list[int] = field(default_factory=list)
    registered: list[int] = field(default_factory=list)
    error: int = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802 - as it is there
        assert (size, flags) == (PART_BYTES, 0)
        self.asked.append(address)
        if len(self.asked) - 1 in self.refused:
            self.error = 2
            return 2
        self.registered.append(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - as it is there
        assert address in self.registered
        if self.asked.index(address) in self.keeps:
            self.error = 713
            return 713
        self.registered.remove(address)
        return 0

    def launch(self, size: int, **_: Any) -> object:
        """As each launch does: it takes an error that is there for its own, and that clears it."""
        if self.error:
            self.error = 0
            raise RuntimeError("CUDA error")
        return np.zeros(size, np.int8)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Runtime]:
    """Makes the runtime that torch has from then on."""

    def make(*, refused: Sequence[int] = (), keeps: Sequence[int] = ()) -> Runtime:
        made = Runtime(refused, keeps)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
        monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
        monkeypatch.setattr(torch, "zeros", made.launch)
        return made

    return make


def is_mapped() -> bool:
    return "memfd:xkv-ring" in Path("/proc/self/maps").read_text(encoding="utf-8")


def parts(count: int) -> list[Any]:
    return [np.zeros(PART_BYTES, np.uint8) for _ in range(count)]


def test_what_is_registered_is_given_back_once(
    runtime: Callable[..., Runtime], caplog: pytest.LogCaptureFixture
) -> None:
    cuda, device = runtime(), CudaDevice(torch.device("cpu"))
    own = parts(3)
    device.register(own)
    assert cuda.registered == [part.ctypes.data for part in own]
    device.unregister()
    assert cuda.registered == []
    device.unregister()
    assert not caplog.records


def test_a_refusal_is_one_warning_and_leaves_no_error_behind(
    runtime: Callable[..., Runtime], caplog: pytest.LogCaptureFixture
) -> None:
    cuda, device = runtime(refused=[2]), CudaDevice(torch.device("cpu"))
    device.register(parts(5))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"error 2 after {2 * PART_BYTES} of {5 * PART_BYTES} bytes" in caplog.text
    assert len(cuda.asked) == 3, "one that is refused is enough"
    assert cuda.error == 0, "the next launch would take it for its own"
    device.unregister()
    assert cuda.registered == []


def test_two_devices_of_one_process_give_back_their_own(runtime: Callable[..., Runtime]) -> None:
    cuda = runtime()
    one, other = CudaDevice(torch.device("cpu")), CudaDevice(torch.device("cpu"))
    first, second = parts(2), parts(2)
    one.register(first)
    other.register(second)
    one.unregister()
    assert cuda.registered == [part.ctypes.data for part in second]
    other.unregister()


def test_a_part_that_is_not_given_back_keeps_no_other(
    runtime: Callable[..., Runtime], caplog: pytest.LogCaptureFixture
) -> None:
    cuda, device = runtime(keeps=[1]), CudaDevice(torch.device("cpu"))
    own = parts(3)
    device.register(own)
    device.unregister()
    assert cuda.registered == [own[1].ctypes.data]
    assert "error 713" in caplog.text
    assert cuda.error == 0


@pytest.mark.parametrize("closed", [True, False])
def test_memory_is_given_back_before_it_is_unmapped_however_the_device_ends(
    runtime: Callable[..., Runtime], monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    """An engine that fails between registration and its first job closes nothing; the next one is mapped there."""
    cuda, device = runtime(), CudaDevice(torch.device("cpu"))
    ring = Ring.create(8, PART_BYTES)
    ring.close()  # the mapping lives as long as any view of it does
    device.register([ring.array[number : number + 1] for number in range(8)])
    tensor: Any = device.host_bytes(ring.array)
    mapped: list[bool] = []
    real = cuda.cudaHostUnregister

    def note(address: int) -> int:
        mapped.append(is_mapped())
        return real(address)

    monkeypatch.setattr(cuda, "cudaHostUnregister", note)
    assert is_mapped()
    if closed:
        device.unregister()
    del ring, device
    gc.collect()
    assert is_mapped(), "a tensor is a view"
    assert tensor.sum() == 0
    del tensor
    gc.collect()
    assert mapped == [True] * 8
    assert cuda.registered == []
    assert not is_mapped()


def test_loads_streams_are_urgent_and_waits_do_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda *args, **options: made.append((*args, options)))
    monkeypatch.setattr(torch.cuda, "Event", lambda **options: made.append((options,)))
    where = torch.device("cpu")
    device = CudaDevice(where)
    for urgent in (True, False):
        device.stream(urgent=urgent)
    device.event()
    assert made == [(where, {"priority": -1}), (where, {"priority": 0}), ({"blocking": True},)]


def test_a_mark_is_recorded_on_the_stream_that_vllm_works_on(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[tuple[object, object]] = []

    class Event:
        def record(self, stream: object) -> None:
            recorded.append((self, stream))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("the stream of", device))
    where = torch.device("cpu")
    marks = [CudaDevice(where).mark() for _ in range(2)]
    assert recorded == [(mark, ("the stream of", where)) for mark in marks]
    assert marks[0] is not marks[1]
