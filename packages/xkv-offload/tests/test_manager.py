"""The manager: only confirmed objects hit, one failed load is a miss, nothing escapes, sheds from the tail."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from xkv_offload import manager as manager_module
from xkv_offload.manager import ManagerOptions, Words, XkvManager
from xkv_offload.metrics import PROCESS_COUNTERS, WORKER_COUNTERS
from xkv_offload.remote_lookups import RemoteLookups
from xkv_offload.restore_policy import STEPS_MIN, ChunkFacts, RestorePolicy, Stage
from xkv_offload.staging import Chunk, ReadDone, Staging
from xkv_offload.transfer import StagedObject, XkvTransferSpec
from xkv_store.client_seeks import SoughtObject, SoughtStatus
from xkv_store.key import ObjectKey, chunk_tag, ranks_mask, tag_salt
from xkv_store.left_out import LeftOut

NAMESPACE = b"n" * 16


class FakeTable:
    """Tag → (generation, ranks), as the gateway would publish it."""

    def __init__(self) -> None:
        self.entries: dict[int, tuple[int, int]] = {}

    @property
    def lookup(self) -> Callable[[int], tuple[int, int] | None]:
        return self.entries.get

    @property
    def highest_generation(self) -> int:
        return max((generation for generation, _ in self.entries.values()), default=0)


@dataclass
class FakeCard:
    table: FakeTable = field(default_factory=FakeTable)
    living: bool = True
    touched: list[int] = field(default_factory=list)
    new_denials: list[tuple[int, int]] = field(default_factory=list)
    lost: bool = False
    backlog: int = 0
    closed: bool = False
    new_counts: Sequence[int] = ()
    totals: tuple[int, int] = (0, 0)
    omissions: Counter[LeftOut] = field(default_factory=Counter)

    def left_out(self, reason: LeftOut, chunks: int) -> None:
        self.omissions[reason] += chunks

    def loaded(self) -> Sequence[tuple[int, int]]:
        return [self.totals]

    def alive(self) -> bool:
        return self.living

    def touch(self, tags: Sequence[int]) -> None:
        self.touched.extend(tags)

    def denials(self) -> tuple[Sequence[tuple[int, int]], Mapping[int, int]]:
        found, self.new_denials = self.new_denials, []
        lost, self.lost = self.lost, False
        return found, {0: self.table.highest_generation} if lost else {}

    def store_bytes(self) -> int:
        return self.backlog

    def worker_counts(self) -> Sequence[int]:
        found, self.new_counts = self.new_counts, ()
        return found

    def fragments(self, tag: int) -> int:
        return 1 if tag in self.table.entries else 0

    def close(self) -> None:
        self.closed = True

    def confirm(
        self, keys: Iterable[bytes], *, generation: int = 1, ranks: int = 1, namespace: bytes = NAMESPACE
    ) -> None:
        for key in keys:
            for page, mask in ranks_mask(ranks):
                tag = chunk_tag(tag_salt(namespace, int.from_bytes(key[-4:], "big"), page), key[:-4])
                self.table.entries[tag] = (generation, mask)


CHANNEL = {"labelled_stats": True, "histogram_stats": True}


class Stats:
    def __init__(self) -> None:
        self.counted: dict[str, int] = {}
        self.labelled: dict[tuple[str, ...], int] = {}
        self.observed: dict[str, list[float]] = {}

    def increase_counter(self, name: str, value: int, labelvalues: tuple[str, ...] = ()) -> None:
        if labelvalues:
            labels = (name, *labelvalues)
            self.labelled[labels] = value
        else:
            self.counted[name] = value

    def observe_histogram(self, name: str, value: float) -> None:
        self.observed.setdefault(name, []).append(value)


def key(number: int, group: int = 0) -> bytes:
    return number.to_bytes(8, "little") * 4 + group.to_bytes(4, "big")


def request(name: str = "r") -> Any:
    return SimpleNamespace(req_id=name)


def make(
    card: FakeCard,
    *,
    staging: Any = None,
    policy: RestorePolicy | None = None,
    remote: RemoteLookups | None = None,
    event: Any = None,
    features: Mapping[str, bool] | None = None,
    **changes: Any,
) -> XkvManager:
    options: dict[str, Any] = {
        "namespace": NAMESPACE,
        "ranks": 1,
        "group_bytes": {0: 100, 1: 50},
        "store_backlog_bytes": 1000,
        "loads": True,
        "stores": True,
    }
    return XkvManager(
        card=card,
        options=ManagerOptions(**(options | changes)),
        staging=staging,
        policy=policy,
        remote=remote,
        words=Words(
            miss="MISS",
            hit="HIT",
            pending="PENDING",
            prepare_store_output=SimpleNamespace,
            request_context=SimpleNamespace,
            stats=Stats,
            load_source="DISK",
            features=features or CHANNEL,
            event=event,
        ),
    )


def stored(manager: XkvManager, keys: Sequence[bytes], name: str = "r") -> list[bytes]:
    output: Any = manager.prepare_store(keys, request(name))
    assert isinstance(output.store_spec, XkvTransferSpec)
    assert list(output.store_spec.keys) == output.keys_to_store
    return list(output.keys_to_store)


def test_only_what_every_rank_has_confirmed_is_a_hit() -> None:
    card = FakeCard()
    manager = make(card, ranks=3)
    assert manager.lookup(key(1), request()) == "MISS"
    card.confirm([key(1)], ranks=2)
    assert manager.lookup(key(1), request()) == "MISS"
    card.confirm([key(1)], ranks=3)
    assert manager.lookup(key(1), request()) == "HIT"
    assert manager.lookup(key(1, group=1), request()) == "MISS"


def test_more_than_64_ranks_need_every_entry() -> None:
    card = FakeCard()
    manager = make(card, ranks=70)
    card.confirm([key(1)], ranks=64)
    assert manager.lookup(key(1), request()) == "MISS"
    card.confirm([key(1)], ranks=70)
    assert manager.lookup(key(1), request()) == "HIT"


@pytest.mark.parametrize("ranks", [1, 8, 64])
def test_a_lookup_costs_the_same_for_any_number_of_ranks(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One entry has all their bits; 64 ranks would else be 64 lookups, on vLLM's scheduling thread."""
    card = FakeCard()
    manager = make(card, ranks=ranks)
    keys = [key(number) for number in range(10)]
    card.confirm(keys, ranks=ranks)
    asked: list[int] = []

    def lookup(table: FakeTable) -> Any:
        def find(tag: int) -> Any:
            asked.append(tag)
            return table.entries.get(tag)

        return find

    monkeypatch.setattr(FakeTable, "lookup", property(lookup))
    assert [manager.lookup(one, request()) for one in keys] == ["HIT"] * 10
    assert len(asked) == 10


def test_what_one_rank_lacks_is_a_miss_and_is_stored_again() -> None:
    """By all ranks: which of them lack it only the card knows, and those whose object it holds it answers so."""
    card = FakeCard()
    manager = make(card, ranks=8)
    card.confirm([key(1), key(2)], ranks=8)
    for tag, (generation, bits) in list(card.table.entries.items())[:1]:
        card.table.entries[tag] = generation, bits & ~(1 << 5)
    assert manager.lookup(key(1), request()) == "MISS"
    assert stored(manager, [key(1), key(2)]) == [key(1)]
    card.confirm([key(1)], ranks=8)
    assert manager.lookup(key(1), request()) == "HIT"


def test_a_dead_gateway_misses_and_stores_nothing() -> None:
    card = FakeCard(living=False)
    card.confirm([key(1)])
    manager = make(card)
    assert manager.lookup(key(1), request()) == "MISS"
    assert stored(manager, [key(2)]) == []


def test_a_failed_load_is_a_miss_until_a_fresh_generation() -> None:
    card = FakeCard()
    manager = make(card)
    card.confirm([key(1)], generation=5)
    assert manager.lookup(key(1), request()) == "HIT"
    card.new_denials = [(next(iter(card.table.entries)), 5)]
    assert manager.lookup(key(1), request()) == "MISS"
    output: Any = manager.prepare_store([key(1)], request())
    assert output.store_spec.replace == (True,)
    card.confirm([key(1)], generation=6)
    assert manager.lookup(key(1), request()) == "HIT"


def test_what_fails_right_after_its_store_is_stored_again_at_once_and_once() -> None:
    """It waits for no confirmation any more; until it does, its prefix would be computed anew by each request."""
    card = FakeCard()
    manager = make(card)
    assert stored(manager, [key(1), key(2)]) == [key(1), key(2)]
    card.confirm([key(1), key(2)], generation=5)
    card.new_denials = [(next(iter(card.table.entries)), 5)]
    assert stored(manager, [key(1), key(2)], "second") == [key(1)]
    assert stored(manager, [key(1), key(2)], "third") == []
    card.confirm([key(1)], generation=6)
    assert manager.lookup(key(1), request()) == "HIT"
    card.lost = True
    assert stored(manager, [key(1), key(2)], "fourth") == [key(1), key(2)]


def test_lost_denials_deny_all_that_is_confirmed() -> None:
    card = FakeCard()
    manager = make(card)
    card.confirm([key(1), key(2)], generation=7)
    card.lost = True
    assert manager.lookup(key(1), request()) == "MISS"
    card.confirm([key(2)], generation=8)
    assert manager.lookup(key(2), request()) == "HIT"


def test_stores_are_a_subset_in_order_without_what_is_held_or_pending() -> None:
    card = FakeCard()
    manager = make(card)
    card.confirm([key(2)])
    assert stored(manager, [key(1), key(2), key(3)]) == [key(1), key(3)]
    assert stored(manager, [key(1), key(3), key(4)], "other") == [key(4)]


def test_an_unconfirmed_store_may_be_stored_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_module, "PENDING_SECONDS", -1.0)
    manager = make(FakeCard())
    assert stored(manager, [key(1)]) == [key(1)]
    manager.complete_store({key(1)}, request())
    assert manager.lookup(key(1), request()) == "MISS"
    assert stored(manager, [key(1)]) == [key(1)]


def test_a_backlog_sheds_the_tail_and_the_rest_of_the_request() -> None:
    card = FakeCard(backlog=750)
    manager = make(card)
    assert stored(manager, [key(1), key(2), key(3)]) == [key(1), key(2)]
    card.backlog = 0
    manager.complete_store({key(1), key(2)}, request())
    assert stored(manager, [key(4)]) == []
    assert stored(manager, [key(4)], "other") == [key(4)]
    manager.on_request_finished(request())
    assert stored(manager, [key(5)]) == [key(5)]


def test_what_is_left_out_is_told_to_the_gateway_with_its_reason() -> None:
    """No store of it comes there: whoever asks the gateway why it is not held would hear nothing."""
    card = FakeCard(backlog=850)
    manager = make(card)
    assert stored(manager, [key(1), key(2), key(3)]) == [key(1)]
    assert stored(manager, [key(4)]) == []
    assert card.omissions == {LeftOut.BACKLOG: 3}
    card.backlog, card.living = 0, False
    assert stored(manager, [key(5), key(6)], "other") == []
    assert card.omissions == {LeftOut.BACKLOG: 3, LeftOut.NO_GATEWAY: 2}
    card.living = True
    manager.on_new_request(request("third"))
    manager.reset_cache()
    assert stored(manager, [key(7)], "third") == []
    assert card.omissions[LeftOut.RESET] == 1
    for changes, reason in (({"stores": False}, LeftOut.ROLE), ({"store_threshold": 2}, LeftOut.RARE)):
        card = FakeCard()
        assert stored(make(card, **changes), [key(1), key(2)]) == []
        assert card.omissions == {reason: 2}


def test_groups_without_bytes_are_never_stored() -> None:
    assert stored(make(FakeCard(), group_bytes={0: 0, 1: 50}), [key(1), key(1, group=1)]) == [key(1, group=1)]


def test_a_chunk_is_stored_once_enough_requests_have_asked_for_it() -> None:
    manager = make(FakeCard(), store_threshold=3)
    assert stored(manager, [key(1)], "a") == []
    assert stored(manager, [key(1), key(2)], "b") == []
    assert stored(manager, [key(1), key(2)], "c") == [key(1)]
    assert stored(manager, [key(1), key(2)], "d") == [key(2)], "the first is pending, and not counted any more"
    stats: Any = manager.get_stats()
    assert stats.counted["vllm:xkv_rare_keys"] == 4


@pytest.mark.parametrize("threshold", [0, 1])
def test_without_a_threshold_the_first_request_stores(threshold: int) -> None:
    manager = make(FakeCard(), store_threshold=threshold)
    assert stored(manager, [key(1)]) == [key(1)]
    assert manager._asked is None, "and nothing is counted"


def test_what_is_computed_again_behind_a_missing_chunk_counts_as_asked_for() -> None:
    card = FakeCard()
    manager = make(card)
    card.confirm([key(2)])
    assert manager.lookup(key(1), request()) == "MISS"
    assert stored(manager, [key(1), key(2)]) == [key(1)]
    manager.on_schedule_end(None)
    assert len(card.touched) == 1


def test_recency_goes_out_once_a_step() -> None:
    card = FakeCard()
    manager = make(card)
    card.confirm([key(1), key(2)])
    manager.lookup(key(1), request())
    manager.lookup(key(2), request())
    assert card.touched == []
    manager.on_schedule_end(None)
    assert len(card.touched) == 2
    manager.on_schedule_end()
    assert len(card.touched) == 2


def test_a_reset_leaves_the_old_namespace_for_lookups_and_stores() -> None:
    card = FakeCard()
    manager = make(card)
    card.confirm([key(1)])
    before: Any = manager.prepare_store([key(2)], request())
    manager.reset_cache()
    assert manager.lookup(key(1), request()) == "MISS"
    after: Any = manager.prepare_store([key(2)], request())
    assert before.store_spec.namespace == NAMESPACE != after.store_spec.namespace
    assert manager.prepare_load([key(2)], request()).namespace == after.store_spec.namespace


def test_what_was_under_way_at_a_reset_stores_nothing_more() -> None:
    # vLLM offers its chunks anew, with blocks that other requests have overwritten meanwhile.
    manager = make(FakeCard())
    manager.on_new_request(request("old"))
    manager.on_new_request(request("done"))
    manager.on_request_finished(request("done"))
    manager.reset_cache()
    manager.on_new_request(request("new"))
    assert stored(manager, [key(1)], "old") == []
    manager.on_request_finished(request("old"))
    assert stored(manager, [key(1)], "old") == [], "0.26 offers once more after the end"
    assert stored(manager, [key(1)], "new") == [key(1)]
    manager.on_new_request(request("old"))
    assert stored(manager, [key(2)], "old") == [key(2)]


@pytest.mark.parametrize(("changes", "hit", "kept"), [({"loads": False}, "MISS", 1), ({"stores": False}, "HIT", 0)])
def test_producers_only_store_and_consumers_only_load(changes: dict[str, Any], hit: str, kept: int) -> None:
    card = FakeCard()
    manager = make(card, **changes)
    card.confirm([key(1)])
    assert manager.lookup(key(1), request()) == hit
    assert len(stored(manager, [key(2)])) == kept


def test_no_exception_leaves_a_method() -> None:
    class Broken(FakeCard):
        def alive(self) -> bool:
            raise OSError("gone")

        def touch(self, tags: Sequence[int]) -> None:
            raise OSError("gone")

        def close(self) -> None:
            raise OSError("gone")

    manager = make(Broken())
    assert manager.lookup(key(1), request()) == "MISS"
    assert stored(manager, [key(1)]) == []
    manager.on_schedule_end()
    stats: Any = manager.get_stats()
    assert stats.counted["vllm:xkv_manager_errors"] == 2
    manager.shutdown()


def test_stats_are_increments_and_none_where_nothing_happened() -> None:
    manager = make(FakeCard())
    assert manager.get_stats() is None
    manager.lookup(key(1), request())
    stats: Any = manager.get_stats()
    assert stats.counted == {"vllm:xkv_lookup_misses": 1}
    assert stats.labelled == {("vllm:xkv_misses", "absent"): 1}
    assert manager.get_stats() is None


def test_what_ranks_have_counted_is_told_with_it_and_counted_in_no_process_twice() -> None:
    card = FakeCard()
    manager = make(card)
    card.new_counts = [3 if name == "load_failures" else 0 for name in WORKER_COUNTERS]
    before = dict(PROCESS_COUNTERS)
    stats: Any = manager.get_stats()
    assert stats.counted == {"vllm:xkv_load_failures": 3}
    assert stats.labelled == {("vllm:xkv_failures", "load"): 3}
    assert before == PROCESS_COUNTERS
    assert manager.get_stats() is None


def test_misses_have_their_reasons() -> None:
    card = FakeCard()
    manager = make(card, ranks=2)
    manager.lookup(key(1), request())
    card.confirm([key(2)], ranks=1)
    manager.lookup(key(2), request())
    card.confirm([key(3)], ranks=2, generation=5)
    card.new_denials = [(chunk_tag(tag_salt(NAMESPACE, 0, 0), key(3)[:-4]), 5)]
    manager.lookup(key(3), request())
    card.living = False
    manager.lookup(key(3), request())
    stats: Any = manager.get_stats()
    reasons = ("absent", "incomplete", "denied", "no_gateway")
    assert stats.labelled == {("vllm:xkv_misses", reason): 1 for reason in reasons}
    assert stats.counted["vllm:xkv_lookup_denied"] == 1
    card.living = True
    manager = make(card, staging=Staging(FakeReads(), pending_seconds=-1, groups=1))
    card.confirm([key(4)])
    manager.lookup(key(4), request())
    stats = manager.get_stats()
    assert stats.labelled == {("vllm:xkv_misses", "unverified"): 1}


class FakeRemote:
    """A gateway's remote: what was sought, and answers when the test says."""

    usable = True

    def __init__(self) -> None:
        self.asked: list[tuple[list[tuple[int, int]], bool]] = []
        self._on_answer: Callable[[SoughtObject], None]

    def ask(
        self, objects: Sequence[tuple[ObjectKey, int]], *, fetch: bool, on_answer: Callable[[SoughtObject], None]
    ) -> None:
        self.asked.append(([(one.rank, fragments) for one, fragments in objects], fetch))
        self._on_answer = on_answer

    def answer(self, status: SoughtStatus) -> None:
        for index in range(len(self.asked[-1][0])):
            self._on_answer(SoughtObject(index, status))


def test_what_the_card_lacks_is_pending_until_the_remote_has_brought_it() -> None:
    """Asked, fetched, and then a hit by the table alone; of a chunk only those ranks' objects that are not there."""
    card, remote = FakeCard(), FakeRemote()
    manager = make(card, ranks=3, remote=RemoteLookups(remote, pending_seconds=60, fragments={0: 7, 1: 7}), loads=True)
    card.confirm([key(1)], ranks=1)
    assert manager.lookup(key(1), request()) == "PENDING"
    manager.on_schedule_end()
    assert remote.asked == [([(1, 7), (2, 7)], False)]
    remote.answer(SoughtStatus.FOUND)
    assert manager.lookup(key(1), request()) == "PENDING"
    manager.on_schedule_end()
    assert remote.asked[1:] == [([(1, 7), (2, 7)], True)]
    card.confirm([key(1)], ranks=3)
    remote.answer(SoughtStatus.FOUND)
    assert manager.lookup(key(1), request()) == "HIT"
    assert manager.lookup(key(2), request()) == "PENDING"
    manager.on_schedule_end()
    remote.answer(SoughtStatus.ABSENT)
    assert manager.lookup(key(2), request()) == "MISS"
    stats: Any = manager.get_stats()
    assert stats.counted["vllm:xkv_lookup_remote"] == 3
    assert stats.labelled == {("vllm:xkv_misses", "absent"): 1}


def test_the_remote_is_not_asked_for_what_failed_here_nor_after_a_reset() -> None:
    card, remote = FakeCard(), FakeRemote()
    manager = make(card, remote=RemoteLookups(remote, pending_seconds=60, fragments={0: 7}))
    card.confirm([key(1)], generation=5)
    card.new_denials = [(chunk_tag(tag_salt(NAMESPACE, 0, 0), key(1)[:-4]), 5)]
    assert manager.lookup(key(1), request()) == "MISS", "the card would say that it has it"
    manager.reset_cache()
    assert manager.lookup(key(2), request()) == "MISS", "the namespace is this launch's own from now on"
    manager.on_schedule_end()
    assert remote.asked == []


def test_times_and_sizes_are_measured() -> None:
    card = FakeCard()
    manager = make(card)
    manager.lookup(key(1), request())
    manager.lookup(key(2), request())
    manager.on_schedule_end()
    stored(manager, [key(1), key(2), key(1, group=1)])
    manager.complete_store([key(1), key(2), key(1, group=1)], request())
    card.confirm([key(1)])
    manager.prepare_load([key(1)], request())
    manager.complete_load([key(1)], request())
    stats: Any = manager.get_stats()
    assert {name: len(values) for name, values in stats.observed.items()} == {
        f"vllm:xkv_{name}": 1
        for name in ("lookup_seconds", "store_seconds", "store_chunks", "store_job_bytes", "load_seconds",
                     "load_chunks", "load_job_bytes")
    }  # fmt: skip
    assert stats.observed["vllm:xkv_store_chunks"] == [3]
    assert stats.observed["vllm:xkv_store_job_bytes"] == [250]
    assert stats.observed["vllm:xkv_load_job_bytes"] == [100]
    assert 0 < stats.observed["vllm:xkv_lookup_seconds"][0] < 1


def test_a_request_waits_from_its_first_answer_that_is_put_off_to_its_last() -> None:
    card = FakeCard()
    card.confirm([key(1), key(2)])
    reads = FakeReads()
    manager = make(card, staging=Staging(reads, pending_seconds=10, groups=1))
    assert manager.lookup(key(1), request()) == "PENDING"
    manager.on_schedule_end()
    stats: Any = manager.get_stats()
    assert "vllm:xkv_wait_seconds" not in stats.observed
    assert manager.lookup(key(1), request()) == "HIT"
    manager.on_schedule_end()
    manager.on_schedule_end()
    stats = manager.get_stats()
    assert len(stats.observed["vllm:xkv_wait_seconds"]) == 1
    assert manager.lookup(key(2), request("gone")) == "PENDING"
    manager.on_request_finished(request("gone"))
    stats = manager.get_stats()
    assert len(stats.observed["vllm:xkv_wait_seconds"]) == 1


def test_without_labels_or_histograms_the_plain_counters_are_left() -> None:
    manager = make(FakeCard(), features={"labelled_stats": False, "histogram_stats": False})
    manager.lookup(key(1), request())
    manager.on_schedule_end()
    stats: Any = manager.get_stats()
    assert (stats.counted, stats.labelled, stats.observed) == ({"vllm:xkv_lookup_misses": 1}, {}, {})


def test_memory_of_a_long_run_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for bound in ("PENDING_KEYS_MAX", "REQUESTS_MAX", "DENIED_MAX", "TOUCHED_MAX"):
        monkeypatch.setattr(manager_module, bound, 10)
    card = FakeCard()
    manager = make(card, store_backlog_bytes=10**9)
    for number in range(100):
        stored(manager, [key(number)], str(number))
        card.confirm([key(number)])
        card.new_denials = [(number, 1)]
        manager.lookup(key(number), request())
    sizes = [len(manager._pending), len(manager._requests), len(manager._denied), len(manager._touched)]
    assert all(size <= 10 for size in sizes), sizes


@dataclass
class FakeReads:
    """A staged region of eight slots, read at once, well or not."""

    ok: bool = True
    slots: int = 8
    free: int = 8
    done: list[ReadDone] = field(default_factory=list)

    def take(self, count: int) -> list[int] | None:
        self.free -= count
        return list(range(count))

    def give(self, slots: Sequence[int]) -> None:
        self.free += len(slots)

    def start(self, chunk: Chunk) -> None:
        self.done += [ReadDone(chunk, number, 1, 100, self.ok, not self.ok) for number in range(len(chunk.slots))]

    def send(self) -> None: ...

    def loaded(self) -> Sequence[tuple[int, int]]:
        return [(0, 0)]

    def finished(self) -> Iterable[ReadDone]:
        taken, self.done = self.done, []
        return taken


def test_where_no_load_may_fail_a_hit_is_verified_first() -> None:
    card, reads = FakeCard(), FakeReads()
    card.confirm([key(1)], ranks=2)
    manager = make(card, staging=Staging(reads, pending_seconds=2, groups=1), ranks=2)
    assert manager.lookup(key(2), request()) == "MISS"
    assert manager.lookup(key(1), request()) == "PENDING"
    manager.on_schedule_end()
    assert manager.lookup(key(1), request()) == "HIT"
    spec = manager.prepare_load([key(1)], request())
    assert spec.staged == ((StagedObject(1, 100, (0,)), StagedObject(1, 100, (1,))),)
    assert not manager.has_pending_work()
    manager.on_request_finished(request())
    assert reads.free == 6, "the job's copy may still run"
    manager.complete_load({key(1)}, request())
    assert reads.free == 8


def test_what_cannot_be_verified_is_a_miss_until_it_is_stored_anew() -> None:
    card, reads = FakeCard(), FakeReads(ok=False)
    card.confirm([key(1)], generation=1)
    manager = make(card, staging=Staging(reads, pending_seconds=2, groups=1))
    assert manager.lookup(key(1), request()) == "PENDING"
    manager.on_schedule_end()
    assert [manager.lookup(key(1), request()) for _ in range(2)] == ["MISS", "MISS"]
    assert manager.lookup(key(1), request("another")) == "MISS"
    output: Any = manager.prepare_store([key(1)], request())
    assert output.store_spec.replace == (True,), "what the card holds of it is not believed"
    reads.ok = True
    card.confirm([key(1)], generation=2)
    assert manager.lookup(key(1), request("third")) == "PENDING"
    manager.on_schedule_end()
    assert manager.lookup(key(1), request("third")) == "HIT"


def test_a_request_that_waited_too_long_is_counted() -> None:
    card = FakeCard()
    card.confirm([key(1)])
    manager = make(card, staging=Staging(FakeReads(), pending_seconds=-1, groups=1))
    assert manager.lookup(key(1), request()) == "MISS"
    stats: Any = manager.get_stats()
    assert stats.counted["vllm:xkv_pending_timeouts"] == 1


def policy_of(card: FakeCard, clock: Callable[[], float]) -> RestorePolicy:
    facts = ChunkFacts(tokens=512, object_bytes=512_000, is_prefix=True)
    return RestorePolicy(chunks={0: facts}, stages=[Stage(card.loaded)], clock=clock)


def test_hits_that_take_longer_than_computing_are_declined_and_not_stored_again() -> None:
    now = [0.0]
    card = FakeCard()
    manager = make(card, policy=policy_of(card, lambda: now[0]))
    keys = [key(number) for number in range(4)]
    card.confirm(keys)
    assert manager.wants_steps
    for _ in range(STEPS_MIN):
        manager.step_scheduled(1_000)
        now[0] += 0.1
        assert list(manager.take_events()) == []
    assert [manager.lookup(one, request("slow")) for one in keys] == ["HIT"] * 4
    manager.prepare_load(keys, request("slow"))
    card.totals = 4 * 512_000, 2_000_000_000  # a thousand tokens a second, not ten thousand
    manager.complete_load(set(keys), request("slow"))
    manager.on_request_finished(request("slow"))
    for _ in range(2):  # also in a later step
        assert [manager.lookup(one, request("next")) for one in keys] == ["MISS"] * 4
        manager.on_schedule_end()
    assert set(card.touched) >= set(card.table.entries), "it is in demand all the same"
    assert stored(manager, keys, "next") == []
    assert manager.lookup(key(9), request("next")) == "MISS"
    manager.on_request_finished(request("next"))
    stats: Any = manager.get_stats()
    assert stats.counted["vllm:xkv_lookup_declined"] == 8
    assert stats.counted["vllm:xkv_lookup_misses"] == 1
    assert stats.counted["vllm:xkv_held_keys"] == 4
    assert "vllm:xkv_restore_probes" not in stats.counted
    now[0] += 10.0
    assert manager.lookup(keys[0], request("probe")) == "HIT"
    manager.take_events()
    stats = manager.get_stats()
    assert stats.counted["vllm:xkv_restore_probes"] == 1


def test_a_declined_request_is_not_staged() -> None:
    """Where hits are verified first, reading what is then not taken would keep the slow medium busy."""
    now = [0.0]
    card = FakeCard()
    reads = FakeReads()
    policy = policy_of(card, lambda: now[0])
    manager = make(card, staging=Staging(reads, pending_seconds=10, groups=1), policy=policy)
    card.confirm([key(1)])
    for _ in range(STEPS_MIN):
        manager.step_scheduled(1_000)
        now[0] += 0.1
        manager.take_events()
    card.totals = 1, 5_000_000_000
    assert manager.lookup(key(1), request()) == "MISS"
    manager.on_schedule_end()
    assert reads.done == []
    assert reads.free == reads.slots


def test_events_tell_what_the_card_holds_and_holds_no_more() -> None:
    def event(keys: Sequence[bytes], removed: bool) -> tuple[bool, list[bytes]]:
        return removed, list(keys)

    card = FakeCard()
    manager = make(card, event=event)
    assert stored(manager, [key(1), key(2)]) == [key(1), key(2)]
    manager.complete_store({key(1), key(2)}, request())
    assert list(manager.take_events()) == [], "that its bytes have left the GPU proves nothing"
    card.confirm([key(1)])
    assert list(manager.take_events()) == [(False, [key(1)])]
    card.confirm([key(2), key(3)], generation=2)
    assert list(manager.take_events()) == [(False, [key(2)])]
    assert manager.lookup(key(3), request("other")) == "HIT"
    assert list(manager.take_events()) == [(False, [key(3)])], "another engine's"
    card.living = False
    card.table.entries.clear()
    assert list(manager.take_events()) == [], "it may be there again when the gateway is"
    card.living = True
    told: list[Any] = list(manager.take_events())
    ((removed, keys),) = told
    assert removed
    assert sorted(keys) == [key(1), key(2), key(3)]
    card.confirm([key(1)], generation=3)
    assert manager.lookup(key(1), request()) == "HIT"
    card.new_denials = [(next(iter(card.table.entries)), 3)]
    assert list(manager.take_events()) == [(False, [key(1)])]
    assert manager.lookup(key(1), request()) == "MISS"
    assert list(manager.take_events()) == [(True, [key(1)])], "it is not believed"
    card.confirm([key(4)], generation=4)
    manager.lookup(key(4), request())
    manager.take_events()
    manager.reset_cache()
    assert list(manager.take_events()) == [(True, [key(4)])]


def test_nobody_listens_and_nothing_is_remembered() -> None:
    card = FakeCard()
    manager = make(card)
    card.confirm([key(1)])
    assert manager.lookup(key(1), request()) == "HIT"
    assert manager._announced is None
    assert list(manager.take_events()) == []
