"""A card's sums at rest: what the gateway says, what the lookup table says, what lies on the medium.

Owns: the comparisons. Must not know: how the card came to be full.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from soak.objects import Objects, object_key
from xkv_store.audit import closed_card
from xkv_store.card_options import CardOptions
from xkv_store.index import SCAN_BATCH
from xkv_store.layout import parse_record
from xkv_store.verify import Unnamed, Verified, verify

if TYPE_CHECKING:
    from pathlib import Path

    from ranks.gateway import RunGateway
    from soak.outcome import Outcome
    from xkv_store.client import Client

REST_S_MAX: Final = 60.0
REST_ROUND_S: Final = 0.2


def at_rest(gateway: RunGateway, grace_s: float) -> dict[str, Any]:
    """The status once nothing is in flight, in limbo or uncommitted."""
    end = time.monotonic() + REST_S_MAX + grace_s
    while True:
        status = gateway.status()
        moving = status["slots"]["in_flight"] + status["slots"]["limbo"] + status["uncommitted"]
        if not moving or time.monotonic() > end:
            return status
        time.sleep(REST_ROUND_S)


def compare_with_table(status: dict[str, Any], client: Client, objects: Objects, numbers: int, out: Outcome) -> None:
    """Every object that was ever put and that the lookup table has, against the gateway's sums."""
    slots = status["slots"]
    if slots["in_flight"] or slots["limbo"] or status["uncommitted"]:
        out.note("accounting_errors", f"the card does not come to rest: {slots}")
    lookup = client.table.lookup
    held = [number for number in range(numbers) if lookup(object_key(number).tag) is not None]
    found = {
        "objects": len(held),
        "object_bytes": sum(objects.length(number) for number in held),
        "used": sum(objects.fragments(number) for number in held),
        "table_entries": len(held),
    }
    said = {**{name: status[name] for name in found if name != "used"}, "used": slots["used"]}
    if found != said:
        out.note("accounting_errors", f"the lookup table has {found}, the gateway says {said}")
    if slots["used"] + slots["free"] != status["slots_total"]:
        out.note("accounting_errors", f"at rest {slots} of {status['slots_total']}")


def compare_with_medium(status: dict[str, Any], card: Path, out: Outcome) -> None:
    """`xkv verify`'s own passes over the card that no gateway has any more."""
    options = CardOptions(folder=card, create=False)
    stored = 0
    for found in verify(options, drop=False):
        if isinstance(found, Verified):
            out.audited_objects += 1
            stored += found.length
        if found.problem and not isinstance(found, Unnamed):
            out.note("audit_errors", f"{found}")
    with closed_card(options) as closed:
        index = closed.open_index()
        assert not isinstance(index, str), index
        _, used = closed.survey(index)
        extents = sum(len(parse_record(record).extents) for _, records in index.scan(SCAN_BATCH) for record in records)
        index.close()
    slots = int(sum(rows.sum() for rows in used))
    out.extents_per_object = round(extents / max(1, out.audited_objects), 3)
    on_medium = {"objects": out.audited_objects, "object_bytes": stored, "used": slots}
    said = {"objects": status["objects"], "object_bytes": status["object_bytes"], "used": status["slots"]["used"]}
    if on_medium != said:
        out.note("audit_errors", f"the medium has {on_medium}, the gateway said {said}")
