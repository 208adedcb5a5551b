"""What engines leave out themselves comes from their control pages to whoever asks why."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from xkv_store import wire
from xkv_store.control import COUNTERS_PER_RANK, ControlPage
from xkv_store.engines import Engines
from xkv_store.geometry import Geometry
from xkv_store.left_out import COUNT_MAX, NAMESPACES_MAX, NUMBERS, REASONS, Ledger, LeftOut, Omission
from xkv_store.wire import Hello, Role, encode
from xkv_store.wire_tools import OBJECTS_EXPLAINED_MAX, Explained, LeftOutStores
from xkv_store.wire_types import MESSAGE_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator

GEOMETRY = Geometry(16_384)
OWN = b"o" * 16


class Clock:
    """Each reading is a second later."""

    def __init__(self) -> None:
        self.now_s = 0

    def __call__(self) -> int:
        self.now_s += 1
        return self.now_s * 1_000_000_000


def counts(**amounts: int) -> list[int]:
    return [amounts.get(reason.value, 0) for reason in REASONS]


def test_reasons_have_counters_of_their_own_on_the_page() -> None:
    assert len(set(NUMBERS.values())) == len(REASONS)
    assert max(NUMBERS.values()) < COUNTERS_PER_RANK


def test_sums_are_by_namespace_and_reason_with_the_time_of_the_last() -> None:
    ledger = Ledger(Clock())
    ledger.add(OWN, counts(backlog=3, no_slot=1))
    ledger.add(b"p" * 16, counts(rare=7))
    ledger.add(OWN, counts(backlog=2))
    ledger.add(OWN, counts())
    assert ledger.of([OWN, b"q" * 16]) == {
        OWN: {LeftOut.BACKLOG: Omission(5, 3_000), LeftOut.NO_SLOT: Omission(1, 1_000)}
    }


def test_what_a_broken_engine_counts_stays_bounded() -> None:
    ledger = Ledger(Clock())
    for number in range(NAMESPACES_MAX + 1):
        ledger.add(number.to_bytes(16, "big"), counts(backlog=1))
    assert ledger.of([bytes(16)]) == {}, "the one of which nothing came for the longest time"
    ledger.add(OWN, counts(backlog=COUNT_MAX))
    ledger.add(OWN, counts(backlog=COUNT_MAX))
    assert ledger.of([OWN])[OWN][LeftOut.BACKLOG].count == COUNT_MAX


def test_pages_have_each_reason() -> None:
    docs = Path(__file__).parents[3] / "docs"
    table = (docs / "why.md").read_text().partition("| reason | left out |")[2].partition("\n\n")[0]
    assert re.findall(r"(?m)^\| `(\w+)`", table) == [reason.value for reason in REASONS]
    drawn = " ".join((docs / "format.md").read_text().split())
    assert [reason for reason, number in NUMBERS.items() if f"{number} `{reason.value}`" not in drawn] == []


def test_an_answer_with_all_reasons_of_all_namespaces_fits_a_message() -> None:
    left_out = tuple(
        LeftOutStores(bytes([number]) * 16, reason, COUNT_MAX, 1 << 44)
        for number in range(OBJECTS_EXPLAINED_MAX)
        for reason in REASONS
    )
    assert len(encode(Explained(1, (), (), 0, 0, "", left_out))) < MESSAGE_BYTES_MAX // 4


def sessions(engines: Engines[str]) -> Iterator[tuple[str, Role, int]]:
    for name, role, rank in (("scheduler", Role.SCHEDULER, 0), ("first", Role.RANK, 0), ("second", Role.RANK, 1)):
        hello = Hello(
            version=wire.PROTOCOL_VERSION, engine_id="e", role=role, rank=rank, world_size=2, ring_bytes=1 << 20,
            load_reserve_bytes=1 << 18, staged_bytes=0, fragment_bytes=GEOMETRY.fragment_bytes, pid=1,
        )  # fmt: skip
        engines.attach(hello, (), name)
        yield name, role, rank


def test_a_gateway_takes_in_what_all_ranks_of_an_engine_have_counted_until_it_goes() -> None:
    engines: Engines[str] = Engines(
        slot_bytes=GEOMETRY.slot_bytes, fragment_bytes=GEOMETRY.fragment_bytes, boot_id=b"b" * 16
    )
    attached = list(sessions(engines))
    (engine,) = engines
    theirs = ControlPage.attach(os.dup(engine.control.fd))
    theirs.add_count(0, NUMBERS[LeftOut.BACKLOG], 4)
    theirs.add_count(0, NUMBERS[LeftOut.NO_SLOT], 1)
    theirs.add_count(1, NUMBERS[LeftOut.NO_SLOT], 2)
    theirs.add_count(1, 0, 99)
    engines.look()
    assert engines.left_out.of([b"", OWN]) == {}, "of which namespace is not known yet"
    engine.adopted = OWN
    engines.beat(1 << 60)
    found = engines.left_out.of([OWN])[OWN]
    assert {reason: one.count for reason, one in found.items()} == {LeftOut.BACKLOG: 4, LeftOut.NO_SLOT: 3}
    theirs.add_count(1, NUMBERS[LeftOut.PARTIAL], 6)
    for _, role, rank in attached:
        engines.detach(engine, role, rank)
    assert len(engines) == 0
    assert engines.left_out.of([OWN])[OWN][LeftOut.PARTIAL].count == 6, "what it counted last is not lost"
    theirs.close()
