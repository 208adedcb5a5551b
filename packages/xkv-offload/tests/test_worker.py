"""One rank's jobs against a real gateway: bytes, waits, failures, deadlines; nothing escapes."""

import json
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from xkv_offload import jobs as jobs_module
from xkv_offload import worker as worker_module
from xkv_offload.attachment import StagedReads
from xkv_offload.copy import HostMover, Move
from xkv_offload.failures import FailureLog, LoadFailedError, Plan
from xkv_offload.layout import ObjectLayout, Page
from xkv_offload.loads import Loads
from xkv_offload.metrics import PROCESS_COUNTERS
from xkv_offload.rank import RankContext
from xkv_offload.staging import Answer, Staging
from xkv_offload.transfer import XkvTransferSpec
from xkv_offload.worker import XkvWorker
from xkv_store import sockets
from xkv_store.client import Attachment, Client, PutObject
from xkv_store.control import DenialReader
from xkv_store.left_out import NUMBERS, LeftOut
from xkv_store.ring import RingUse
from xkv_store.sockets import socket_for_port
from xkv_store.testing.processes import PORT, GatewayProcess, running_gateway
from xkv_store.tool import Tool
from xkv_store.wire import Role, StoredObject

SLOT = 65_536
BPC = 4
PAGES = (40_000, 24_001)  # a sub-block of about one fragment that ends at no round place
BLOCKS = 32
POISON = 0xA5
NAMESPACE = b"n" * 16
DEADLINE_S = 20.0


@dataclass
class Blocks:
    """The part of vLLM's GPULoadStoreSpec that a worker reads."""

    block_ids: Any
    group_sizes: Sequence[int]
    block_indices: Sequence[int]


@dataclass
class Result:
    job_id: int
    success: bool
    transfer_size: int
    transfer_time: float


@contextmanager
def worker_on(
    folder: Path,
    *,
    engine: str = "e",
    lone: bool = False,
    channel: Any = "block_errors",
    load_timeout_s: float = 10.0,
    ring_slots: int = 64,
    staged_slots: int = 0,
    poisoned: bool = False,
    heartbeat_timeout_ms: int = 3_000,
) -> Iterator[tuple[XkvWorker, list[Any]]]:
    """A worker with tensors of random bytes (or poison) and its tensors."""
    client = Client.attach(
        Attachment(
            socket=socket_for_port(folder / "sockets", PORT),
            engine_id=engine,
            role=Role.RANK,
            rank=0,
            world_size=1,
            ring_bytes=ring_slots * SLOT,
            load_reserve_bytes=ring_slots * SLOT // 4,
            staged_bytes=staged_slots * SLOT,
            ring_use=RingUse.LEASED,
            fragment_bytes=SLOT - 1024,
            connect_timeout_ms=10_000,
            heartbeat_timeout_ms=heartbeat_timeout_ms,
            embedded=None,
        )
    )
    random = np.random.default_rng(7)
    tensors = [
        np.full((BLOCKS, size + 8), POISON, np.uint8)
        if poisoned
        else random.integers(0, 256, (BLOCKS, size + 8), dtype=np.uint8)
        for size in PAGES
    ]
    worker = XkvWorker(
        context=RankContext(
            client=client,
            rank=0,
            object_rank=0,
            writes=True,
            blocks_per_chunk=BPC,
            fragment_bytes=SLOT - 1024,
            layouts=[ObjectLayout(BPC, tuple(Page(number, size) for number, size in enumerate(PAGES)))],
            lone_last_block=[lone],
            positions={0: 0},
            mover=HostMover(tensors),
            load_timeout_s=load_timeout_s,
            failure_plan=Plan(channel, "no channel" if channel == "verified" else ""),
            failures=FailureLog(),
        ),
        transfer_result=Result,
    )
    try:
        yield worker, tensors
    finally:
        worker.shutdown()


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[GatewayProcess]:
    with running_gateway(tmp_path, slot_bytes=SLOT) as running:
        yield running


def key(number: int) -> bytes:
    return number.to_bytes(8, "little") * 4 + bytes(4)


def spec(keys: Sequence[int]) -> XkvTransferSpec:
    count = len(keys)
    return XkvTransferSpec(
        namespace=NAMESPACE,
        keys=tuple(map(key, keys)),
        req_id="r",
        family=1,
        positions=tuple(range(count)),
        replace=(False,) * count,
    )


def whole(first: int, chunks: int) -> Blocks:
    return Blocks(np.arange(first, first + chunks * BPC, dtype=np.int32), [chunks * BPC], [0])


def held_back(monkeypatch: pytest.MonkeyPatch, name: str) -> threading.Event:
    """From now on every copy of this name waits until the event is set."""
    go_on = threading.Event()
    real = getattr(HostMover, name)

    def slow(self: HostMover, move: Move) -> None:
        assert go_on.wait(DEADLINE_S)
        real(self, move)

    monkeypatch.setattr(HostMover, name, slow)
    return go_on


def finish(worker: XkvWorker, job: int) -> Result:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        for result in worker.get_finished():
            assert result.job_id == job
            assert isinstance(result, Result)
            return result
        time.sleep(0.002)
    raise AssertionError(f"job {job} was not reported within {DEADLINE_S} s")


def until_confirmed(objects: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while PROCESS_COUNTERS["confirmed_objects"] < objects:
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture(autouse=True)
def counters() -> Iterator[None]:
    for name in PROCESS_COUNTERS:
        PROCESS_COUNTERS[name] = 0
    yield
    assert PROCESS_COUNTERS["worker_errors"] == 0


def store(worker: XkvWorker, keys: Sequence[int]) -> None:
    assert worker.submit_store(0, whole(1, len(keys)), spec(keys))
    assert finish(worker, 0).transfer_size == len(keys) * BPC * sum(PAGES)
    until_confirmed(len(keys))


def check(before: list[Any], after: list[Any], moved: dict[int, int]) -> None:
    """Destination → source block; everything else is still poison, padding included."""
    for source, target, size in zip(before, after, PAGES, strict=True):
        expected = np.full_like(target, POISON)
        for into, origin in moved.items():
            expected[into, :size] = source[origin, :size]
        assert (target == expected).all()


def test_the_scheduler_can_read_how_fast_a_rank_loads(gateway: GatewayProcess, tmp_path: Path) -> None:
    """What failed costs time and brings nothing, or a medium that fails would look fast."""
    with worker_on(tmp_path, engine="a") as (first, _):
        store(first, [1, 2])
        assert first.context.client.control.loaded(0) == (0, 0), "stores are no loads"
    with worker_on(tmp_path, engine="b", poisoned=True) as (second, _):
        loaded = second.context.client.control.loaded
        assert second.submit_load(0, spec([1, 2]), whole(10, 2))
        assert finish(second, 0).transfer_size == 2 * BPC * sum(PAGES)
        moved, busy_ns = loaded(0)
        assert moved == 2 * BPC * sum(PAGES)
        assert 0 < busy_ns < DEADLINE_S * 1e9
        second.get_finished()
        assert loaded(0) == (moved, busy_ns), "nothing is under way"
        assert second.submit_load(1, spec([9]), whole(10, 1))
        finish(second, 1)
        assert loaded(0)[0] == moved
        assert loaded(0)[1] > busy_ns
        assert second.context.failures.take()


def test_what_one_engine_stored_another_loads_byte_for_byte(gateway: GatewayProcess, tmp_path: Path) -> None:
    with worker_on(tmp_path, engine="a") as (first, stored):
        store(first, [1, 2, 3])
    with worker_on(tmp_path, engine="b", poisoned=True) as (second, loaded):
        assert second.submit_load(0, spec([1, 2, 3]), whole(10, 3))
        assert finish(second, 0).transfer_size == 3 * BPC * sum(PAGES)
        check(stored, loaded, {10 + i: 1 + i for i in range(12)})
        assert second.context.failures.take() == set()


def test_where_vllm_asks_handlers_one_worker_goes_both_ways(gateway: GatewayProcess, tmp_path: Path) -> None:
    """Taken for the other direction, a load would store its empty pages under the right keys."""
    with worker_on(tmp_path, engine="a") as (first, stored):
        assert first.transfer_async(0, (whole(1, 2), spec([1, 2])))
        finish(first, 0)
        until_confirmed(2)
    with worker_on(tmp_path, engine="b", poisoned=True) as (second, loaded):
        assert second.transfer_async(0, (spec([1, 2]), whole(10, 2)))
        finish(second, 0)
        check(stored, loaded, {10 + i: 1 + i for i in range(8)})


def test_a_load_of_the_middle_touches_only_its_blocks(gateway: GatewayProcess, tmp_path: Path) -> None:
    with worker_on(tmp_path, engine="a") as (first, stored):
        store(first, [1, 2])
    with worker_on(tmp_path, engine="b", poisoned=True) as (second, loaded):
        second.submit_load(0, spec([1, 2]), Blocks([20, 21, 9], [3], [2]))
        finish(second, 0)
        check(stored, loaded, {20: 3, 21: 4, 9: 5})


def test_a_load_larger_than_its_region_goes_in_turns(gateway: GatewayProcess, tmp_path: Path) -> None:
    with worker_on(tmp_path, engine="a") as (first, stored):
        store(first, [1, 2, 3, 4, 5])
    with worker_on(tmp_path, engine="b", poisoned=True, ring_slots=20) as (second, loaded):
        second.submit_load(0, spec([1, 2, 3, 4, 5]), whole(5, 5))
        finish(second, 0)
        check(stored, loaded, {5 + i: 1 + i for i in range(20)})


def test_a_chunk_larger_than_the_region_fails_softly(gateway: GatewayProcess, tmp_path: Path) -> None:
    with worker_on(tmp_path, engine="a") as (first, _):
        store(first, [1])
    with worker_on(tmp_path, engine="b", poisoned=True, ring_slots=8) as (second, loaded):
        second.submit_load(0, spec([1]), whole(5, 1))
        assert finish(second, 0).success
        assert second.context.failures.take() == {5, 6, 7, 8}
        check(loaded, loaded, {})


@pytest.mark.parametrize("bad", ["bits", "absent"])
def test_a_failed_object_is_denied_reported_and_touches_nothing(
    gateway: GatewayProcess, tmp_path: Path, bad: str
) -> None:
    with worker_on(tmp_path, engine="a") as (first, stored):
        store(first, [1, 2])
    if bad == "bits":
        card = tmp_path / "card" / "db-0.xkv"
        content = bytearray(card.read_bytes())
        at = content.find(stored[0][5, :64].tobytes())
        content[at] ^= 1
        with card.open("r+b") as file:
            file.seek(at)
            file.write(content[at : at + 1])
    asked = [1, 2] if bad == "bits" else [1, 99]
    with worker_on(tmp_path, engine="b", poisoned=True) as (second, loaded):
        reader = DenialReader(second.context.client.control)
        second.submit_load(0, spec(asked), whole(10, 2))
        result = finish(second, 0)
        assert result.success
        assert second.context.failures.take() == {14, 15, 16, 17}
        check(stored, loaded, {10: 1, 11: 2, 12: 3, 13: 4})
        denied = reader.poll().pairs
        assert [tag for tag, _ in denied] == [second.context.object_key(NAMESPACE, key(asked[1])).tag]
        assert PROCESS_COUNTERS["load_failures"] == 1


def test_with_request_errors_the_request_of_a_failed_load_is_named(gateway: GatewayProcess, tmp_path: Path) -> None:
    with worker_on(tmp_path, channel="request_errors") as (worker, _):
        worker.submit_load(0, spec([99]), whole(1, 1))
        assert finish(worker, 0).success
        assert worker.context.failures.take_requests() == {"r"}
        assert worker.context.failures.take() == set()
        # vLLM does not look at requests for loads inside a step.
        worker.submit_load(1, spec([99]), whole(1, 1), expedited=True)
        worker.wait({1})
        assert finish(worker, 1).success
        assert worker.context.failures.take_requests() == set()
        assert worker.context.failures.take() == {1, 2, 3, 4}


def test_where_hits_are_verified_a_failed_load_ends_the_engine_with_an_error_that_says_so(
    gateway: GatewayProcess, tmp_path: Path
) -> None:
    with worker_on(tmp_path, channel="verified") as (worker, _):
        worker.submit_load(0, spec([99]), whole(1, 1))
        with pytest.raises(LoadFailedError, match="no channel"):
            finish(worker, 0)


@contextmanager
def scheduler_of(folder: Path, *, engine: str, ring_slots: int = 64) -> Iterator[Staging]:
    """The scheduler's side of an engine whose rank is attached: its staged region, on the client's real reads."""
    client = Client.attach(
        Attachment(
            socket=socket_for_port(folder / "sockets", PORT),
            engine_id=engine,
            role=Role.SCHEDULER,
            rank=0,
            world_size=1,
            ring_bytes=ring_slots * SLOT,
            load_reserve_bytes=ring_slots * SLOT // 4,
            staged_bytes=None,
            ring_use=None,
            fragment_bytes=SLOT - 1024,
            connect_timeout_ms=10_000,
            heartbeat_timeout_ms=3_000,
            embedded=None,
        )
    )
    try:
        yield Staging(StagedReads(client), pending_seconds=DEADLINE_S, groups=1)
    finally:
        client.close()


def verified(staging: Staging, keys: Sequence[int]) -> XkvTransferSpec:
    """A load's spec for chunks that have been read into the ring."""
    wanted = [key(number) for number in keys]
    deadline = time.monotonic() + DEADLINE_S
    while True:
        answers = {
            staging.lookup(req_id="r", namespace=NAMESPACE, key=one, objects=1, fragments=lambda: 4) for one in wanted
        }
        if answers == {Answer.HIT}:
            break
        assert answers <= {Answer.HIT, Answer.PENDING}
        assert time.monotonic() < deadline
        staging.end_step()
        time.sleep(0.002)
    return XkvTransferSpec(
        namespace=NAMESPACE, keys=tuple(wanted), req_id="r", staged=staging.take_for_load("r", wanted)
    )


def test_verified_objects_are_copied_from_the_ring_with_no_gateway_at_all(
    gateway: GatewayProcess, tmp_path: Path
) -> None:
    with worker_on(tmp_path, engine="a") as (first, stored):
        store(first, [1, 2, 3])
    with (
        worker_on(tmp_path, engine="b", poisoned=True, channel="verified", staged_slots=16) as (second, loaded),
        scheduler_of(tmp_path, engine="b") as staging,
    ):
        told = verified(staging, [2, 3])
        gateway.kill()
        second.submit_load(0, told, Blocks([20, 21, 9, 10, 11], [5], [2]))
        assert finish(second, 0).transfer_size == 5 * sum(PAGES)
        check(stored, loaded, {20: 7, 21: 8, 9: 9, 10: 10, 11: 11})


def test_a_verified_object_whose_slot_was_given_away_is_not_served(gateway: GatewayProcess, tmp_path: Path) -> None:
    with worker_on(tmp_path, engine="a") as (first, _):
        store(first, [1])
    with (
        worker_on(tmp_path, engine="b", poisoned=True, channel="verified", staged_slots=16) as (second, loaded),
        scheduler_of(tmp_path, engine="b") as staging,
    ):
        told = verified(staging, [1])
        staging.loaded("r", [key(1)])
        second.submit_load(0, told, whole(1, 1))
        with pytest.raises(LoadFailedError, match="had been verified"):
            finish(second, 0)
        check(loaded, loaded, {})


def test_the_staged_region_outlives_a_gateway_whoever_comes_back_first(gateway: GatewayProcess, tmp_path: Path) -> None:
    with worker_on(tmp_path, engine="a") as (first, stored):
        store(first, [1])
    with (
        worker_on(tmp_path, engine="b", poisoned=True, channel="verified", staged_slots=16) as (second, loaded),
        scheduler_of(tmp_path, engine="b") as staging,
    ):
        gateway.kill()
        with running_gateway(tmp_path, slot_bytes=SLOT):
            deadline = time.monotonic() + DEADLINE_S
            while not second.context.client.alive():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            told = None
            while told is None:
                assert time.monotonic() < deadline
                try:
                    told = verified(staging, [1])
                except AssertionError:  # a read that met the gap; a later request asks anew
                    staging.forget("r")
                    time.sleep(0.05)
            second.submit_load(0, told, whole(1, 1))
            assert finish(second, 0).transfer_size == BPC * sum(PAGES)
            check(stored, loaded, {1 + at: 1 + at for at in range(4)})


def test_a_stopped_gateway_delays_neither_submit_nor_wait_and_its_late_answer_touches_nothing(
    gateway: GatewayProcess, tmp_path: Path
) -> None:
    with worker_on(tmp_path, engine="a") as (first, _):
        store(first, [1])
    with worker_on(tmp_path, engine="b", poisoned=True, load_timeout_s=0.3) as (worker, loaded):
        gateway.signal(signal.SIGSTOP)
        try:
            started = time.monotonic()
            worker.submit_load(1, spec([1]), whole(1, 1))
            worker.submit_store(2, whole(9, 1), spec([7]))
            worker.wait({2, 77})
            assert time.monotonic() - started < 2.0
            results = {result.job_id: result for result in worker.get_finished()}
            assert results.keys() == {2}
            assert finish(worker, 1).success
            assert worker.context.failures.take() == {1, 2, 3, 4}
        finally:
            gateway.signal(signal.SIGCONT)
        until_confirmed(1)
        check(loaded, loaded, {})
        region = worker.context.client.lease_budget
        deadline = time.monotonic() + DEADLINE_S
        while region.free < region.count:  # the late answer gives the slots back
            assert time.monotonic() < deadline
            time.sleep(0.005)


def test_a_copy_under_an_ended_lease_is_thrown_away_and_the_object_read_again(
    gateway: GatewayProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway that came back gives slots to others while this rank copies: what it copied may be anything."""
    with worker_on(tmp_path, engine="a") as (first, stored):
        store(first, [1, 2])
    with worker_on(tmp_path, engine="b", poisoned=True) as (second, loaded):
        mover, control = second.context.mover, second.context.client.control
        assert isinstance(mover, HostMover)
        real, copies = mover.scatter, []

        def scatter(move: Any) -> None:
            copies.append(move)
            if len(copies) > 1:
                real(move)
                return
            for tensor in loaded:
                tensor[move.part.blocks[0]] = 0
            control.end_term(0)
            second.context.client.leases.term = control.term(0)  # as a new session's welcome does

        monkeypatch.setattr(mover, "scatter", scatter)
        second.submit_load(0, spec([1, 2]), whole(10, 2))
        assert finish(second, 0).success
        assert second.context.failures.take() == set()
        for source, target, size in zip(stored, loaded, PAGES, strict=True):
            assert (target[10:18, :size] == source[1:9, :size]).all()
        assert (PROCESS_COUNTERS["load_rereads"], PROCESS_COUNTERS["load_objects"]) == (len(copies) - 2, 2)
        assert len(copies) > 2
        budget, deadline = second.context.client.lease_budget, time.monotonic() + DEADLINE_S
        while budget.free < budget.count:  # the last one is let go once its job is reported
            assert time.monotonic() < deadline
            time.sleep(0.001)


class FedBetween:
    """A lock for loads. Whenever it is let go, another thread feeds: copy thread and client's thread both do."""

    def __init__(self, loads: Loads, lock: threading.RLock) -> None:
        self._loads = loads
        self._lock = lock
        self._of = threading.local()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._of.depth = self._depth + 1

    def __exit__(self, *_: object) -> None:
        self._of.depth = self._depth - 1
        self._lock.release()
        if self._depth == 0:
            self._of.depth = 1  # not for what this feeding does
            self._loads._feed()
            self._of.depth = 0

    @property
    def _depth(self) -> int:
        return int(vars(self._of).get("depth", 0))


def test_what_is_asked_for_again_counts_once_in_its_ranks_share(gateway: GatewayProcess, tmp_path: Path) -> None:
    """It may be on its way a second time before the first lease is given back, and it has then another size."""
    with worker_on(tmp_path, engine="a") as (first, stored):
        store(first, [1])
    with worker_on(tmp_path, engine="b", lone=True, poisoned=True) as (second, loaded):
        loads, budget = second._loads, second.context.client.lease_budget
        loads._lock = FedBetween(loads, second._lock)  # type: ignore[assignment]
        for job in range(3):
            second.submit_load(job, spec([1]), Blocks([9], [1], [3]))
            finish(second, job)
        second.shutdown()  # the copy thread gives the last share back after its load is reported
        assert budget.free == budget.count
        check(stored, loaded, {9: 4})


def test_equal_prompts_share_what_lies_in_the_ring(gateway: GatewayProcess, tmp_path: Path) -> None:
    """Fifty jobs of one worker for the same chunk are one read of it."""
    with worker_on(tmp_path, engine="a") as (first, stored):
        store(first, [1])
    with worker_on(tmp_path, engine="b", poisoned=True) as (second, loaded):
        for job in range(50):
            second.submit_load(job, spec([1]), whole(1 + 4 * (job % 7), 1))
        left = set(range(50))
        deadline = time.monotonic() + DEADLINE_S
        while left:
            left -= {result.job_id for result in second.get_finished()}
            assert time.monotonic() < deadline
            time.sleep(0.002)
        assert second.context.failures.take() == set()
        check(stored, loaded, {1 + 4 * place + at: 1 + at for place in range(7) for at in range(4)})
        with closing(Tool(tmp_path / "sockets" / f"{PORT}.sock")) as tool:
            assert json.loads(tool.status())["counters"]["reads"] == 1


@contextmanager
def gateway_that(state: str, gateway: GatewayProcess, worker: XkvWorker) -> Iterator[None]:
    """One that stands still, or is dead and known to be, or (`lives`) does its work."""
    if state == "is dead":
        gateway.kill()
        deadline = time.monotonic() + DEADLINE_S
        while worker.context.client.alive():
            assert time.monotonic() < deadline
            time.sleep(0.002)
    if state == "stands still":
        gateway.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        if state == "stands still":
            gateway.signal(signal.SIGCONT)


BELIEVED_MS = 3_600_000  # as within the heartbeat's bound: one that stands still is given work
every_gateway = pytest.mark.parametrize("state", ["lives", "stands still", "is dead"])

# Calls that may wait for somebody else, as the interpreter names them. A lock that is taken by `with` is none of
# them: it is held for as long as a few lines take, by threads that make no such call while they hold it.
WAITING = {"acquire", "accept", "connect", "join", "poll", "read", "recv", "recvmsg", "recv_fds", "select", "sleep"}


def foreign_calls(work: Callable[[], object]) -> list[str]:
    """The names of all calls out of Python that `work` makes on this thread."""
    names: list[str] = []

    def note(frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and frame.f_code.co_name != "_is_owned":  # a condition's: it tries, and does not wait
            names.append(called.__name__)

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return names


@every_gateway
def test_a_submit_makes_no_call_that_waits(gateway: GatewayProcess, tmp_path: Path, state: str) -> None:
    with worker_on(tmp_path, engine="a") as (first, _):
        store(first, [1, 2])
    with (
        worker_on(tmp_path, engine="b", poisoned=True, heartbeat_timeout_ms=BELIEVED_MS) as (worker, _),
        gateway_that(state, gateway, worker),
    ):
        calls = foreign_calls(lambda: worker.submit_load(1, spec([1, 2]), whole(1, 2)))
        calls += foreign_calls(lambda: worker.submit_store(2, whole(9, 2), spec([7, 8])))
        assert set(calls) & WAITING == set()
        assert "send" not in calls, "the load's message is the copy thread's to send"
    assert sockets._SEND_FLAGS & socket.MSG_DONTWAIT, "a send that waits for room"


def test_the_list_of_calls_that_wait_has_teeth() -> None:
    ready = threading.Event()
    ready.set()
    assert set(foreign_calls(lambda: time.sleep(0))) & WAITING
    assert set(foreign_calls(lambda: threading.Event().wait(0.001))) & WAITING


@every_gateway
def test_submits_take_less_than_a_millisecond(gateway: GatewayProcess, tmp_path: Path, state: str) -> None:
    """More stores than the ring holds: those beyond it are shed and counted, and the backlog is the ring's at most."""
    with (
        worker_on(tmp_path, load_timeout_s=0.3, heartbeat_timeout_ms=BELIEVED_MS) as (worker, _),
        gateway_that(state, gateway, worker),
    ):
        jobs, taken_s = 300, []
        for job in range(jobs):
            begun = time.perf_counter()
            worker.submit_store(job, whole(1, 1), spec([job]))
            taken_s.append(time.perf_counter() - begun)
            begun = time.perf_counter()
            worker.submit_load(jobs + job, spec([1]), whole(9, 1))
            taken_s.append(time.perf_counter() - begun)
        taken_s.sort()
        assert taken_s[len(taken_s) // 2] < 0.001
        assert taken_s[-1] < DEADLINE_S / 2, "the machine's own pauses, not a disk's or a gateway's"
        finished: list[int] = []
        deadline = time.monotonic() + DEADLINE_S
        while len(finished) < 2 * jobs:
            assert time.monotonic() < deadline
            finished += [result.job_id for result in worker.get_finished()]
            time.sleep(0.002)
        assert sorted(finished) == list(range(2 * jobs)), "each is reported once"
        assert PROCESS_COUNTERS["store_objects"] + PROCESS_COUNTERS["shed_objects"] == jobs
        assert worker.context.client.control.store_bytes() <= worker.context.client.store_region.count * SLOT
        if state != "lives":
            assert PROCESS_COUNTERS["shed_objects"] >= jobs - worker.context.client.store_region.count // BPC


def test_copies_that_wait_are_bounded_and_those_beyond_are_shed(
    gateway: GatewayProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_module, "COPY_QUEUE_MAX", 2)
    go_on = held_back(monkeypatch, "gather")
    with worker_on(tmp_path) as (worker, _):
        for job in range(6):
            assert worker.submit_store(job, whole(1, 1), spec([job]))
        assert PROCESS_COUNTERS["shed_objects"] >= 3
        go_on.set()
        worker.wait(set(range(6)))
        assert sorted(result.job_id for result in worker.get_finished()) == list(range(6))
        until_confirmed(6 - PROCESS_COUNTERS["shed_objects"])
        assert worker.context.client.control.store_bytes() == 0


def test_what_waits_for_its_turn_is_what_vllm_said_when_it_asked(
    gateway: GatewayProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM may use its arrays again as soon as it has submitted."""
    go_on = held_back(monkeypatch, "gather")
    with worker_on(tmp_path, engine="a") as (first, stored):
        first.submit_store(0, whole(1, 1), spec([1]))
        blocks = np.arange(5, 5 + BPC, dtype=np.int64)  # as ours: nothing has to convert them
        sizes, indices = [BPC], [0]
        first.submit_store(1, Blocks(blocks, sizes, indices), spec([2]))
        blocks[:], sizes[0], indices[0] = 30, 1, 1
        go_on.set()
        until_confirmed(2)
    with worker_on(tmp_path, engine="b", poisoned=True) as (second, loaded):
        second.submit_load(0, spec([2]), whole(20, 1))
        finish(second, 0)
        check(stored, loaded, {20 + number: 5 + number for number in range(BPC)})


def test_a_store_that_is_waited_for_before_its_turn_comes_first(
    gateway: GatewayProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[int] = []
    begun = threading.Event()
    go_on = held_back(monkeypatch, "gather")
    real = HostMover.gather

    def gather(self: HostMover, move: Move) -> None:
        order.append(move.part.blocks[0])
        begun.set()
        real(self, move)

    monkeypatch.setattr(HostMover, "gather", gather)
    with worker_on(tmp_path) as (worker, _):
        for job in range(3):
            worker.submit_store(job, whole(1 + 8 * job, 2), spec([2 * job, 2 * job + 1]))
            assert begun.wait(DEADLINE_S)
        wait = threading.Thread(target=worker.wait, args=({2},))
        wait.start()
        deadline = time.monotonic() + DEADLINE_S
        while not worker._jobs[2].hurried:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(0.05)  # the queue hears of it next
        go_on.set()
        wait.join(DEADLINE_S)
        until_confirmed(6)
    assert order == [1, 17, 21, 5, 9, 13], "after what had begun"


def test_what_was_submitted_is_stored_before_the_worker_ends(
    gateway: GatewayProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = held_back(monkeypatch, "gather")
    with worker_on(tmp_path) as (worker, _):
        for job in range(3):
            worker.submit_store(job, whole(1 + 4 * job, 1), spec([job]))
        end = threading.Thread(target=worker.shutdown)
        end.start()
        time.sleep(0.05)
        go_on.set()
        end.join(DEADLINE_S)
        assert (PROCESS_COUNTERS["store_objects"], PROCESS_COUNTERS["shed_objects"]) == (3, 0)


def test_an_engine_that_only_asks_for_loads_leaves_the_interpreter_to_the_copies(
    gateway: GatewayProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not one that has a step to run, or can be told of a job, or waits for no load."""
    pauses: list[float] = []

    class Pause(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            pauses.append(timeout)
            return super().wait(timeout)

    with worker_on(tmp_path) as (worker, _):
        monkeypatch.setattr(worker, "_ended", Pause())
        monkeypatch.setattr(worker_module, "IDLE_STEP_SECONDS", DEADLINE_S)
        store(worker, [1])
        assert pauses == [], "nothing is loaded"
        gateway.hold("get.before_read")
        worker.submit_load(1, spec([1]), whole(1, 1))
        gateway.await_point("get.before_read")
        for _ in range(3):
            assert worker.get_finished() == []
        assert pauses == [worker_module.PAUSE_SECONDS] * 3
        monkeypatch.setattr(worker_module, "IDLE_STEP_SECONDS", 0.0)
        assert worker.get_finished() == []
        assert len(pauses) == 3, "a step ran in between"
        monkeypatch.setattr(worker_module, "IDLE_STEP_SECONDS", DEADLINE_S)
        worker.submit_store(2, whole(1, 1), spec([2]))
        worker.wait({2})
        assert [result.job_id for result in worker.get_finished()] == [2]
        assert len(pauses) == 3, "a job had ended before it was asked for"
        monkeypatch.setattr(worker_module, "IDLE_STEP_SECONDS", 0.0)
        gateway.let_go("get.before_read")
        assert finish(worker, 1).success


def test_loads_that_take_too_long_are_counted_once_however_often_vllm_asks(
    gateway: GatewayProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = held_back(monkeypatch, "scatter")
    slow, begun = HostMover.scatter, threading.Event()

    def scatter(self: HostMover, move: Move) -> None:
        begun.set()
        slow(self, move)

    monkeypatch.setattr(HostMover, "scatter", scatter)
    with worker_on(tmp_path, load_timeout_s=0.01) as (worker, _):
        store(worker, [1])
        worker.submit_load(1, spec([1]), whole(5, 1))
        assert begun.wait(DEADLINE_S)
        worker.submit_load(2, spec([1]), whole(9, 1))  # the copy thread does not come to it
        time.sleep(0.02)
        for _ in range(5):
            assert worker.get_finished() == []
        go_on.set()
        ended: list[Result] = []
        deadline = time.monotonic() + DEADLINE_S
        while len(ended) < 2:
            assert time.monotonic() < deadline
            ended += worker.get_finished()
        assert worker.context.failures.take() == set(range(9, 9 + BPC))
        assert PROCESS_COUNTERS["load_timeouts"] == 2


@every_gateway
def test_a_wait_lasts_as_long_as_the_copies_alone(
    gateway: GatewayProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """For known, unknown, finished and duplicate ids, and those of loads that nobody will ever answer."""
    with worker_on(tmp_path, engine="a") as (first, _):
        store(first, [1])
    with (
        worker_on(tmp_path, engine="b", poisoned=True, heartbeat_timeout_ms=BELIEVED_MS) as (worker, _),
        gateway_that(state, gateway, worker),
    ):
        worker.submit_store(3, whole(9, 1), spec([6]))
        assert finish(worker, 3).success
        go_on = held_back(monkeypatch, "gather")
        if state == "lives":
            gateway.hold("get.before_read")
        worker.submit_load(1, spec([1]), whole(1, 1))
        worker.submit_store(2, whole(9, 1), spec([7]))
        begun = time.monotonic()
        for ids in ({1}, {3}, {99}, {1, 3, 99}, set[int](), {1}):
            worker.wait(ids)
        assert time.monotonic() - begun < 2.0
        if state == "is dead":
            worker.wait({2})  # nothing is copied for nobody
        else:
            waits = [threading.Thread(target=worker.wait, args=(ids,)) for ids in ({2}, {2, 1, 3, 99}, {2})]
            for thread in waits:
                thread.start()
            time.sleep(0.1)
            assert all(thread.is_alive() for thread in waits), "the pages are still being read"
            go_on.set()
            for thread in waits:
                thread.join(2.0)
            assert not any(thread.is_alive() for thread in waits)
        go_on.set()
        assert 2 in {result.job_id for result in worker.get_finished()}
        gateway.let_go("get.before_read")


def test_a_load_that_is_waited_for_after_a_reset_goes_on(gateway: GatewayProcess, tmp_path: Path) -> None:
    # vLLM names loads in wait only after a reset; their blocks stay their request's, and to fail them would end it.
    with worker_on(tmp_path, engine="a") as (first, tensors):
        store(first, [1])
    with worker_on(tmp_path, engine="b", poisoned=True) as (worker, loaded):
        gateway.hold("get.before_read")
        worker.submit_load(0, spec([1]), whole(1, 1))
        gateway.await_point("get.before_read")
        worker.wait({0})
        assert worker.get_finished() == []
        gateway.let_go("get.before_read")
        assert finish(worker, 0).success
        assert worker.context.failures.take() == set()
        check(tensors, loaded, {number: number for number in range(1, 1 + BPC)})


def test_an_expedited_load_is_waited_for(gateway: GatewayProcess, tmp_path: Path) -> None:
    with worker_on(tmp_path, engine="a") as (first, tensors):
        store(first, [1])
    with worker_on(tmp_path, engine="b", poisoned=True) as (worker, loaded):
        worker.submit_load(0, spec([1]), whole(1, 1), expedited=True)
        worker.wait({0})
        check(tensors, loaded, {number: number for number in range(1, 1 + BPC)})
        assert finish(worker, 0).success
        assert worker.context.failures.take() == set()


def test_an_expedited_load_is_given_up_at_its_deadline(gateway: GatewayProcess, tmp_path: Path) -> None:
    with worker_on(tmp_path, engine="a") as (first, _):
        store(first, [1])
    with worker_on(tmp_path, engine="b", poisoned=True, load_timeout_s=0.2) as (worker, loaded):
        gateway.hold("get.before_read")
        worker.submit_load(0, spec([1]), whole(1, 1), expedited=True)
        gateway.await_point("get.before_read")
        worker.wait({0})
        assert finish(worker, 0).success
        assert worker.context.failures.take() == set(range(1, 1 + BPC))
        gateway.let_go("get.before_read")
        assert not worker.get_finished()  # a step, and one that was scheduled ahead: what they computed is not stored
        assert not worker.get_finished()
        store(worker, [5])
        check(loaded, loaded, {})


def test_what_may_follow_from_a_failed_expedited_load_is_not_stored(gateway: GatewayProcess, tmp_path: Path) -> None:
    # The forward pass has read its pages, and so may one that vLLM had scheduled by then: whichever requests' they are.
    with worker_on(tmp_path) as (worker, _):
        worker.submit_load(0, spec([9]), whole(1, 1), expedited=True)
        worker.wait({0})
        (result,) = worker.get_finished()
        assert result.success
        assert worker.context.failures.take() == {1, 2, 3, 4}
        for job in (1, 2, 3):
            worker.submit_store(job, whole(5, 1), spec([job]))
            worker.wait({job})
            assert [one.job_id for one in worker.get_finished()] == [job]
        until_confirmed(1)
        assert PROCESS_COUNTERS["suspect_chunks"] == 2
        assert PROCESS_COUNTERS["store_objects"] == 1


def test_a_failed_load_that_nobody_waited_for_spoils_nothing(gateway: GatewayProcess, tmp_path: Path) -> None:
    with worker_on(tmp_path) as (worker, _):
        worker.submit_load(0, spec([9]), whole(1, 1))
        assert finish(worker, 0).success
        store(worker, [1])
        assert PROCESS_COUNTERS["suspect_chunks"] == 0


def test_an_expedited_copy_that_outlasts_the_wait_ends_the_engine(
    gateway: GatewayProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The forward pass has begun, and nobody can tell what it has read.
    monkeypatch.setattr(worker_module, "WAIT_SECONDS_MAX", 0.1)
    go_on = held_back(monkeypatch, "scatter")
    with worker_on(tmp_path) as (worker, _):
        store(worker, [1])
        worker.submit_load(1, spec([1]), whole(9, 1), expedited=True)
        worker.wait({1})
        with pytest.raises(LoadFailedError, match="did not end its copy"):
            worker.get_finished()
        go_on.set()
    assert PROCESS_COUNTERS["worker_errors"] == 1
    PROCESS_COUNTERS["worker_errors"] = 0


def test_a_dead_gateway_costs_misses_and_nothing_else(gateway: GatewayProcess, tmp_path: Path) -> None:
    with worker_on(tmp_path) as (worker, _):
        store(worker, [1])
        gateway.kill()
        worker.submit_store(1, whole(1, 2), spec([2, 3]))
        worker.wait({1})
        assert finish(worker, 1).success
        many = 7
        worker.submit_load(2, spec([1] * many), whole(1, many))
        assert finish(worker, 2).success
        assert worker.context.failures.take() == set(range(1, 1 + many * BPC))


def test_hundreds_of_chunks_with_a_dead_gateway_do_not_nest(gateway: GatewayProcess, tmp_path: Path) -> None:
    with worker_on(tmp_path) as (worker, _):
        gateway.kill()
        deadline = time.monotonic() + DEADLINE_S
        while worker.context.client.alive() and time.monotonic() < deadline:
            time.sleep(0.005)
        keys = 2_000
        blocks = Blocks([1 + number % 30 for number in range(keys * BPC)], [keys * BPC], [0])
        worker.submit_load(0, spec([1] * keys), blocks)
        assert finish(worker, 0).success


def test_lone_last_blocks_and_whole_chunks_of_one_group_live_together(gateway: GatewayProcess, tmp_path: Path) -> None:
    with worker_on(tmp_path, engine="a", lone=True) as (first, stored):
        first.submit_store(0, Blocks([6], [1], [7]), spec([1]))
        finish(first, 0)
        first.submit_store(1, whole(8, 1), spec([2]))
        finish(first, 1)
        until_confirmed(2)
    with worker_on(tmp_path, engine="b", lone=True, poisoned=True) as (second, loaded):
        second.submit_load(0, spec([1]), Blocks([20], [1], [7]))
        finish(second, 0)
        second.submit_load(1, spec([2]), Blocks([21], [1], [3]))
        finish(second, 1)
        second.submit_load(2, spec([2]), Blocks([22, 23], [2], [2]))
        finish(second, 2)
        check(stored, loaded, {20: 6, 21: 11, 22: 10, 23: 11})
        second.submit_load(3, spec([1]), Blocks([24, 25], [2], [2]))
        finish(second, 3)
        assert second.context.failures.take() == {24, 25}


def left_out(worker: XkvWorker, reason: LeftOut) -> int:
    """What the gateway is told of it."""
    (count,) = worker.context.client.control.counts(0, 1, NUMBERS[reason])
    return count


def test_a_job_that_contradicts_itself_is_survived(gateway: GatewayProcess, tmp_path: Path) -> None:
    with worker_on(tmp_path) as (worker, _):
        worker.submit_store(0, Blocks([1, 2], [3], [0]), spec([1]))
        assert finish(worker, 0).success
        assert PROCESS_COUNTERS["partial_chunks"] == 1
        assert left_out(worker, LeftOut.PARTIAL) == 1
        worker.submit_load(1, spec([1, 2, 3]), Blocks([1], [1], [0]))
        assert finish(worker, 1).success
        assert worker.context.failures.take() == {1}
        assert PROCESS_COUNTERS["worker_errors"] == 1
        PROCESS_COUNTERS["worker_errors"] = 0


def test_a_copy_that_outlasts_the_wait_is_never_put(
    gateway: GatewayProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM overwrites the pages once wait has returned: what was gathered across that moment may be anything.
    monkeypatch.setattr(worker_module, "WAIT_SECONDS_MAX", 0.1)
    go_on = held_back(monkeypatch, "gather")
    with worker_on(tmp_path) as (worker, _):
        worker.submit_store(0, whole(1, 2), spec([1, 2]))
        worker.wait({0})
        go_on.set()
        assert finish(worker, 0).success
        assert PROCESS_COUNTERS["store_objects"] == 0
        assert PROCESS_COUNTERS["shed_objects"] == 2
        assert worker.context.client.store_region.free == worker.context.client.store_region.count
    assert PROCESS_COUNTERS["worker_errors"] == 1
    PROCESS_COUNTERS["worker_errors"] = 0


def test_a_job_of_nothing_is_done_at_once(gateway: GatewayProcess, tmp_path: Path) -> None:
    with worker_on(tmp_path) as (worker, _):
        worker.submit_store(0, Blocks([], [0], [0]), spec([]))
        assert finish(worker, 0).success


def test_a_full_store_region_sheds_and_heals(gateway: GatewayProcess, tmp_path: Path) -> None:
    with worker_on(tmp_path, ring_slots=8) as (worker, _):
        gateway.hold("put.before_write")
        worker.submit_store(0, whole(1, 3), spec([1, 2, 3]))
        assert finish(worker, 0).success
        assert PROCESS_COUNTERS["shed_objects"] == 2
        assert left_out(worker, LeftOut.NO_SLOT) == 2
        assert worker.context.client.control.store_bytes() == 4 * SLOT
        gateway.let_go("put.before_write")
        until_confirmed(1)
        assert worker.context.client.control.store_bytes() == 0
        worker.submit_store(1, whole(1, 1), spec([2]))
        finish(worker, 1)
        until_confirmed(2)


def test_copies_that_do_not_end_well_keep_no_worker_attached(
    gateway: GatewayProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: HostMover) -> None:
        raise RuntimeError("the device is gone")

    with worker_on(tmp_path) as (worker, _), monkeypatch.context() as broken:
        broken.setattr(HostMover, "close", fail)
        worker.shutdown()
        assert not worker.context.client.alive()
    assert PROCESS_COUNTERS["worker_errors"] == 1
    PROCESS_COUNTERS["worker_errors"] = 0


def test_what_ends_together_goes_to_the_gateway_in_one_message(
    gateway: GatewayProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[Callable[[], None]] = []
    wanted = 0

    def later(real: Callable[..., None]) -> Callable[..., None]:
        return lambda *arguments: ended.append(lambda: real(*arguments))

    def advance(_: HostMover) -> bool:
        """As the end of a wave does: all of its copies at once."""
        if len(ended) < wanted:
            time.sleep(0.001)
            return True
        copies, ended[:] = list(ended), []
        for copy in copies:
            copy()
        return False  # whatever has ended: nothing is under way

    for name in ("start_gather", "start_scatter"):
        monkeypatch.setattr(HostMover, name, later(getattr(HostMover, name)))
    monkeypatch.setattr(HostMover, "advance", advance)
    with worker_on(tmp_path) as (worker, tensors):
        client = worker.context.client
        puts: list[int] = []
        releases: list[int] = []
        real_put, real_say = client.put, client.say

        def put(objects: Sequence[PutObject], on_answer: Callable[[StoredObject], None]) -> None:
            puts.append(len(objects))
            real_put(objects, on_answer)

        def say(epoch: int, make: Callable[..., Any]) -> None:
            releases.append(epoch)
            real_say(epoch, make)

        monkeypatch.setattr(client, "put", put)
        monkeypatch.setattr(client, "say", say)
        before = [tensor.copy() for tensor in tensors]
        wanted = 3
        worker.submit_store(0, whole(1, 3), spec([1, 2, 3]))
        finish(worker, 0)
        until_confirmed(3)
        assert puts == [3]
        assert client.control.store_bytes() == 0
        assert client.store_region.free == client.store_region.count
        for tensor, size in zip(tensors, PAGES, strict=True):
            tensor[20:, :size] = POISON
        worker.submit_load(1, spec([1, 2, 3]), whole(20, 3))
        finish(worker, 1)
        for tensor, source, size in zip(tensors, before, PAGES, strict=True):
            assert (tensor[20:32, :size] == source[1:13, :size]).all()
        deadline = time.monotonic() + DEADLINE_S
        while client.lease_budget.free < client.lease_budget.count:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        assert len(releases) == 1, "one lease, released at once"
        wanted = 0
