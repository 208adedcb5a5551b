"""Quotas: a namespace makes room for itself, never at another's cost, and its account is exact whatever happens."""

from __future__ import annotations

import json
import random
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from xkv_store import cli
from xkv_store.card import CardOptions, GetPlan, PutPlan, PutRefusal
from xkv_store.errors import MediumError, UserError
from xkv_store.geometry import DATA_OFFSET, Geometry
from xkv_store.key import ObjectKey
from xkv_store.quotas import Quotas
from xkv_store.recency import Weights
from xkv_store.testing.cards import CardDriver
from xkv_store.testing.peer import Peer
from xkv_store.testing.processes import running_gateway
from xkv_store.tool import Tool
from xkv_store.wire import StoreStatus

SLOT = 4_096
SLOTS = 160
A, B, C = b"\xaa" + bytes(15), b"\xab" + bytes(15), b"\xcc" * 16


def key_of(namespace: bytes, number: int, rank: int = 0) -> ObjectKey:
    return ObjectKey(namespace, 0, number.to_bytes(16, "big"), rank)


def options(tmp_path: Path, *quotas: str, slots: int = SLOTS, grace_ms: int = 1_000) -> CardOptions:
    return CardOptions(
        folder=tmp_path / "card",
        capacity_bytes=DATA_OFFSET + slots * SLOT,
        slot_bytes=SLOT,
        grace_ms=grace_ms,
        quotas=Quotas.parse([text.replace("slots", str(SLOT)) for text in quotas]),
    )


def slots_of(count: int) -> str:
    return str(count * SLOT)


def accounts(driver: CardDriver) -> dict[bytes, dict[str, Any]]:
    return {bytes.fromhex(one["namespace"]): one for one in driver.card.status()["namespaces"]}


def held_slots(driver: CardDriver, namespace: bytes) -> int:
    account = accounts(driver).get(namespace)
    return account["bytes"] // SLOT if account else 0


def put_family(driver: CardDriver, namespace: bytes, numbers: range, slots: int = 1) -> list[bool]:
    """Each of these, of a family of its own; which were taken."""
    taken = []
    for number in numbers:
        plan = driver.put(key_of(namespace, number), bytes(slots * 3_072 - 9), family=number)
        taken.append(isinstance(plan, PutPlan))
    return taken


# --- the rules --------------------------------------------------------------------------------------------------


def test_the_longest_prefix_counts() -> None:
    quotas = Quotas.parse(["10MiB", "a=1MiB", "AA = 2 MiB", f"{B.hex()}=3MB"])
    assert [quotas.of(namespace) for namespace in (A, B, b"\xac" * 16, C)] == [2 << 20, 3_000_000, 1 << 20, 10 << 20]
    assert Quotas.parse([]).of(A) is None
    assert Quotas.parse(["aa=1MiB"]).of(C) is None


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["0"], "out of range"),
        (["10 gallons"], "not a size"),
        (["-5"], "not a size"),
        (["aa="], "not a size"),
        (["=5MiB"], "names no namespace"),
        (["xyz=5MiB"], "names no namespace"),
        ([f"{'a' * 33}=5MiB"], "names no namespace"),
        (["5MiB", "6MiB"], "twice for every namespace"),
        (["aa=5MiB", "AA=6MiB"], "twice for aa"),
        (["a=b=5MiB"], "names no namespace"),
    ],
)
def test_what_is_no_quota_says_so(texts: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said) as error:
        Quotas.parse(texts)
    assert "--quota" in str(error.value)


@pytest.mark.parametrize("quota", ["1GiB", "aa=1GiB", "4095"])
def test_a_quota_that_the_card_makes_no_sense_of_is_refused(tmp_path: Path, quota: str) -> None:
    """Also where the card is new: then nothing of it is left."""
    said = "less than one slot" if quota == "4095" else "more than the card has"
    with pytest.raises(UserError, match=said):
        CardDriver(options(tmp_path, quota))
    assert {path.name for path in (tmp_path / "card").iterdir()} == {"lock"}
    CardDriver(options(tmp_path)).close()
    with pytest.raises(UserError, match=said):
        CardDriver(options(tmp_path, quota))
    CardDriver(options(tmp_path, str(DATA_OFFSET + SLOTS * SLOT))).close()  # the number that --capacity was given


# --- who makes room ---------------------------------------------------------------------------------------------


def test_a_namespace_makes_room_for_itself_alone(tmp_path: Path) -> None:
    driver = CardDriver(options(tmp_path, f"aa={slots_of(20)}"))
    assert all(put_family(driver, B, range(30)))
    taken = []
    for number in range(60):
        taken += put_family(driver, A, range(number, number + 1))
        assert held_slots(driver, A) <= 20
        driver.settle(300)
    assert sum(taken) > 30, "it goes on, its older objects leave"
    assert taken[:10] == [True] * 10
    assert all(driver.get(key_of(B, number)) is not None for number in range(30)), "nobody else's has left"
    assert driver.card.counters()["evicted_objects"] == sum(taken) - accounts(driver)[A]["objects"]
    assert driver.get(key_of(A, 0)) is None
    driver.settle(10_000)
    assert accounts(driver)[A]["limbo_bytes"] == 0
    assert driver.card.slots()["free"] == SLOTS - 30 - held_slots(driver, A)
    driver.close()


def test_it_sheds_where_it_cannot_make_room(tmp_path: Path) -> None:
    """Pinned objects stay; an object that is larger than the quota never comes; nobody else is asked for room."""
    driver = CardDriver(options(tmp_path, slots_of(10)))
    assert all(put_family(driver, B, range(5)))
    assert driver.begin(key_of(A, 99), 11 * 3_072) is PutRefusal.SHED
    pins: list[GetPlan | None] = []
    while put_family(driver, A, range(len(pins), len(pins) + 1)) == [True]:
        pins.append(driver.card.begin_get(key_of(A, len(pins)), driver.now_ns))
    number = len(pins)
    assert number == 10
    assert all(pins)
    for _ in range(20):
        driver.settle(1_000)
        put_family(driver, A, range(100, 101))
    assert held_slots(driver, A) <= 10
    assert all(driver.get(key_of(A, one)) is not None for one in range(number))
    assert all(driver.get(key_of(B, one)) is not None for one in range(5))
    assert driver.card.counters()["puts_over_quota"] >= 2
    for plan in pins:
        assert plan is not None
        driver.card.end_get(plan)
    for _ in range(20):
        driver.settle(1_000)
        if put_family(driver, A, range(100, 101)) == [True]:
            break
    assert driver.get(key_of(A, 100)) is not None
    driver.close()


@pytest.mark.parametrize(("quota", "object_slots"), [(1, 1), (2, 1), (2, 2), (3, 2), (5, 5)])
@pytest.mark.parametrize("whole_card", [False, True])
def test_where_one_object_has_all_of_it_the_next_one_takes_its_place(
    tmp_path: Path, quota: int, object_slots: int, whole_card: bool
) -> None:
    """A quota of one slot was taken once and never again; so was one of three by objects of two."""
    quotas = () if whole_card else (f"aa={slots_of(quota)}",)
    driver = CardDriver(options(tmp_path, *quotas, slots=quota if whole_card else 20))
    taken = []
    for number in range(12):
        taken += put_family(driver, A, range(number, number + 1), object_slots)
        assert held_slots(driver, A) <= quota
        driver.settle(1_100)
    assert taken[0]
    assert sum(taken) >= 6, "each second one at least: one is refused, and room is made for the next"
    driver.close()


@pytest.mark.parametrize("whole_card", [False, True])
def test_what_is_in_flight_where_one_object_fits_is_not_driven_out_by_what_came_meanwhile(
    tmp_path: Path, whole_card: bool
) -> None:
    """Ranks put their parts at once: each would drive out another's."""
    driver = CardDriver(options(tmp_path, *(() if whole_card else (f"aa={SLOT}",)), slots=1 if whole_card else 20))
    flying = driver.begin(key_of(A, 1), 1)
    assert isinstance(flying, PutPlan)
    assert driver.begin(key_of(A, 1, rank=1), 1) is PutRefusal.SHED
    driver.write(flying, b"x")
    driver.card.finish_put(flying, None)
    driver.commit()
    driver.settle(2_000)
    assert (driver.card.slots()["used"], driver.card.counters().get("evicted_objects", 0)) == (1, 0)
    driver.close()


def put_one(driver: CardDriver, namespace: bytes, number: int) -> bool:
    """Of a tag and a family of its own."""
    family = number + 10_000 * namespace[0]
    return isinstance(driver.put(tagged(namespace, number), b"x", family=family), PutPlan)


def tagged(namespace: bytes, number: int) -> ObjectKey:
    return ObjectKey(namespace, 0, number.to_bytes(8, "big") * 2, 0)


def test_what_was_read_while_its_turn_came_leaves_within_two_turns_of_a_small_quota(tmp_path: Path) -> None:
    driver = CardDriver(options(tmp_path, f"aa={slots_of(8)}"))
    assert all(put_one(driver, B, number) for number in range(50))
    assert all(put_one(driver, A, number) for number in range(8))
    held = driver.card.begin_proof(tagged(A, 0))
    assert held is not None
    assert not put_one(driver, A, 1_000)
    driver.card.end_get(held)
    for number in range(8, 8 + 2 * 8):
        driver.settle(1_100)
        assert put_one(driver, A, number)
        assert not put_one(driver, A, 1_000 + number)
    driver.settle(1_100)
    assert driver.get(tagged(A, 0)) is None
    assert accounts(driver)[B]["objects"] == 50
    driver.close()


def test_new_objects_of_a_small_quota_do_not_drive_out_what_is_asked_for_while_nobody_looks(tmp_path: Path) -> None:
    """For 64 choices nobody looked whether some had come: eight turns of this one."""
    driver = CardDriver(options(tmp_path, f"aa={slots_of(8)}"))
    assert all(put_one(driver, B, number) for number in range(50))
    assert all(put_one(driver, A, number) for number in range(8))
    driver.card.touch(tagged(A, number).tag for number in range(8))
    driver.card._recency.weights = Weights(1.0, 100.0, 100.0)
    for number in range(8, 40):
        assert not put_one(driver, A, 1_000 + number)
        driver.settle(1_100)
        driver.settle(1_100)
        assert put_one(driver, A, number)
    assert sum(driver.get(tagged(A, number)) is not None for number in range(8)) >= 6
    driver.close()


def test_an_object_of_more_than_half_the_quota_drives_out_no_two_others(tmp_path: Path) -> None:
    driver = CardDriver(options(tmp_path, f"aa={slots_of(5)}"))
    assert all(put_family(driver, A, range(2)))
    for number in range(10, 20):
        assert put_family(driver, A, range(number, number + 1), 4) == [False]
        driver.settle(1_100)
    assert [driver.get(key_of(A, number)) is not None for number in range(2)] == [True, True]
    driver.close()


def test_a_demand_that_is_met_while_nothing_is_used_does_not_drive_out_what_comes_next(tmp_path: Path) -> None:
    driver = CardDriver(options(tmp_path, f"aa={slots_of(2)}"))
    assert put_family(driver, A, range(1)) == [True]
    flying = driver.begin(key_of(A, 1), 1)
    assert isinstance(flying, PutPlan)
    assert driver.begin(key_of(A, 2), 1) is PutRefusal.SHED
    driver.settle(1_100)
    assert (driver.card.slots()["used"], driver.card.slots()["in_flight"]) == (0, 1)
    second = driver.begin(key_of(A, 2), 1)
    assert isinstance(second, PutPlan)
    for plan in (flying, second):
        driver.write(plan, b"x")
        driver.card.finish_put(plan, None)
    driver.commit()
    driver.settle(1_100)
    assert driver.card.counters()["evicted_objects"] == 1
    assert (driver.card.slots()["used"], driver.card.slots()["limbo"]) == (2, 0)
    driver.close()


def test_over_quota_asks_for_no_room_on_the_card(tmp_path: Path) -> None:
    """Refused puts must not look like a stream of puts for which the whole card makes room."""
    driver = CardDriver(options(tmp_path, f"aa={slots_of(4)}", slots=64))
    assert all(put_family(driver, B, range(60)))
    driver.settle(1_000)
    before = accounts(driver)[B]["objects"]
    for _ in range(200):
        driver.begin(key_of(A, 1), 5 * 3_072)
        driver.settle(10)
    assert accounts(driver)[B]["objects"] == before
    driver.close()


def test_a_lower_quota_is_kept_from_the_next_start_on(tmp_path: Path) -> None:
    driver = CardDriver(options(tmp_path))
    assert all(put_family(driver, A, range(40)))
    assert all(put_family(driver, B, range(40)))
    assert accounts(driver)[A]["quota_bytes"] is None
    driver.close()
    driver = CardDriver(options(tmp_path, f"aa={slots_of(10)}"))
    assert held_slots(driver, A) == 40
    assert driver.begin(key_of(A, 100), 10) is PutRefusal.SHED
    for _ in range(50):
        driver.settle(500)
    assert held_slots(driver, A) <= 10
    assert (held_slots(driver, B), accounts(driver)[B]["objects"]) == (40, 40)
    driver.close()


# --- exactness --------------------------------------------------------------------------------------------------


def assert_exact(driver: CardDriver, quota_slots: dict[bytes, int]) -> None:
    """Accounts add up to the card's own sums, and no account is above its quota."""
    every = list(driver.card._accounts)
    slots = driver.card.slots()
    assert sum(account.in_flight for account in every) == slots["in_flight"]
    assert sum(account.used for account in every) == slots["used"]
    assert sum(account.limbo for account in every) == slots["limbo"]
    assert sum(account.objects for account in every) == driver.card.objects
    for account in every:
        assert min(account.in_flight, account.used, account.limbo, account.objects) >= 0
        total = account.in_flight + account.used + account.limbo
        assert account.held == total <= quota_slots.get(account.namespace, SLOTS)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "replace", "fail", "lose", "drop", "wait", "crash", "half"]),
        st.sampled_from([A, B, C]),
        st.integers(0, 7),
        st.integers(1, 6),
    ),
    max_size=60,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
@example(steps=[("put", A, 2, 3), ("lose", A, 0, 3), ("put", A, 2, 3)])  # keys that share a tag
def test_accounts_are_exact_whatever_happens(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, bytes, int, int]]
) -> None:
    quota_slots = {A: 12, B: 7}
    quotas = [f"{namespace.hex()}={slots_of(slots)}" for namespace, slots in quota_slots.items()]
    driver = CardDriver(options(tmp_path_factory.mktemp("c"), *quotas, slots=40))
    half: list[PutPlan] = []
    for what, namespace, number, slots in steps:
        key, data = key_of(namespace, number, number % 2), bytes(slots * 3_072 - 9)
        if what in ("put", "replace"):
            driver.put(key, data, family=number, replacing=what == "replace")
        elif what in ("fail", "half", "lose"):
            plan = driver.begin(key, len(data), family=number, replacing=True)
            if isinstance(plan, PutPlan) and what == "half":
                half.append(plan)
            elif isinstance(plan, PutPlan):
                driver.card.finish_put(plan, MediumError(5, "x") if what == "fail" else None)
                batch = driver.card.take_commit_batch() if what == "lose" else None
                if batch is not None:
                    driver.card.commit_failed(batch, driver.now_ns)
        elif what == "drop":
            held = driver.card.begin_get(key, driver.now_ns)
            if held is not None:
                driver.card.end_get(held)
                driver.card.drop(key, held.generation, "corrupt")
        elif what == "crash":
            half.clear()
            driver.crash()
        else:
            driver.settle(700 * slots)
        assert_exact(driver, quota_slots)
    for plan in half:
        driver.card.finish_put(plan, None)
    assert_exact(driver, quota_slots)
    driver.settle(5_000)
    driver.settle(5_000)
    before = {account.namespace: (account.objects, account.used) for account in driver.card._accounts}
    driver.commit()
    driver.crash()
    after = {account.namespace: (account.objects, account.used) for account in driver.card._accounts}
    assert after == {name: sums for name, sums in before.items() if sums[1]}, "read from the index, as it was counted"
    driver.close()


# --- a real gateway ---------------------------------------------------------------------------------------------


def test_a_gateway_keeps_quotas_and_shows_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    geometry = Geometry(16_384)
    length = 5 * geometry.fragment_bytes - 77
    quota = 40 * geometry.slot_bytes
    words = ("--quota", f"{A.hex()[:6]}={quota}", "--quota", "2MiB", "--grace-ms", "50")
    content = random.Random(1).randbytes(length)
    with running_gateway(tmp_path, capacity="8MiB", slot_bytes=geometry.slot_bytes, options=words) as gateway:
        with closing(Peer(Path(gateway.ready["socket"]), geometry=geometry)) as peer:
            peer.attach()
            assert peer.put(content, key_of(B, 1).encode()) is StoreStatus.CONFIRMED
            answers = [peer.put(content, key_of(A, number).encode()) for number in range(60)]
            assert answers[:7] == [StoreStatus.CONFIRMED] * 7
            assert set(answers) == {StoreStatus.CONFIRMED, StoreStatus.SHED}
        with closing(Tool(Path(gateway.ready["socket"]))) as tool:
            status = json.loads(tool.status())
        mine = {one["namespace"]: one for one in status["namespaces"]}
        assert (mine[A.hex()]["quota_bytes"], mine[B.hex()]["quota_bytes"]) == (quota, 2 << 20)
        assert 0 < mine[A.hex()]["bytes"] <= quota
        assert mine[B.hex()] | {"objects": 1, "bytes": 5 * geometry.slot_bytes} == mine[B.hex()]
        assert status["counters"]["puts_over_quota"] > 0
        assert cli.main(["gateway", "status", "--socket", gateway.ready["socket"]]) == 0
        assert f"quota_bytes={quota}" in capsys.readouterr().out


@pytest.mark.parametrize("quota", ["0", "1TiB", "zz=1MiB", "5 furlongs", "100"])
def test_senseless_quotas_are_one_line(tmp_path: Path, quota: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["gateway", "run", "--card", str(tmp_path / "card"), "--socket-dir", str(tmp_path / "s")]
    assert cli.main([*words, "--capacity", "8MiB", "--quota", quota]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len([line for line in lines if line.startswith("xkv: ")]) == 1
    assert "Traceback" not in "".join(lines)
    assert "--quota" in lines[-1]


def test_a_status_says_how_many_namespaces_it_does_not_show(tmp_path: Path) -> None:
    driver = CardDriver(options(tmp_path, slots=400))
    for number in range(300):
        assert isinstance(driver.put(key_of(number.to_bytes(16, "big"), 1), b"x"), PutPlan)
    status = driver.card.status()
    assert len(status["namespaces"]) + status["namespaces_left_out"] == 300
    driver.close()
