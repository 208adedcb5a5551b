"""Uses: a call that is not found is a call that nobody checks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from xkv_matrix.check import open_tree
from xkv_matrix.connector import Uses, uses_of

Make = Callable[[dict[str, str]], Path]
_SCHEDULER = "distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py"


def _short(uses: Uses) -> set[str]:
    return {
        f"{use.role} {use.kind} {use.name}({', '.join([*['_'] * use.positional, *use.keywords])})" for use in uses.found
    }


def test_every_use_is_found(make_tree: Make, release: dict[str, str]) -> None:
    uses = uses_of(open_tree(make_tree(release)))
    assert _short(uses) == {
        "manager ask maybe()",
        "manager call complete_store(_, _)",
        "manager call has_pending_work()",
        "manager call lookup(_, _)",
        "manager call prepare_store(_, _)",
        "manager read lock()",
        "request_context read policy()",
        "spec call build_metric_definitions(_)",
        "spec call get_manager()",
        "spec call get_worker(_)",
        "spec make __init__(_)",
        "spec read tokens()",
        "store_output read keys_to_store()",
        "store_output read store_spec()",
        "transfer_result read job_id()",
        "transfer_result read success()",
        "worker call get_finished()",
        "worker call shutdown()",
        "worker call submit_load(_, _, _, expedited)",
    }
    assert uses.unresolved == ()
    lookup = next(use for use in uses.found if use.name == "lookup")
    assert lookup.at.endswith("offloading.scheduler:OffloadingConnectorScheduler.match.count:15")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("m: OffloadingManager = other\n    m.lookup(1, 2)", "manager call lookup(_, _)"),
        ("for m in listed:\n        m.lookup(1, 2)", "manager call lookup(_, _)"),
        ("m, n = pair\n    n.lookup(1, 2)", "manager call lookup(_, _)"),
        ("for _, m in enumerate(listed):\n        m.lookup(1, 2)", "manager call lookup(_, _)"),
        ("[m.lookup(1, 2) for m, _ in zip(listed, listed)]", "manager call lookup(_, _)"),
        ("mapped['a'].lookup(1, 2)", "manager call lookup(_, _)"),
        ("mapped.pop('a').lookup(1, 2)", "manager call lookup(_, _)"),
        ("for m in mapped.values():\n        m.lookup(1, 2)", "manager call lookup(_, _)"),
        ("(maybe or other).lookup(*listed)", "manager call lookup()"),
        ("made().lookup(1, 2)", "manager call lookup(_, _)"),
        ("maybe.touched = 1", "manager write touched()"),
        ("getattr(maybe, 'touched')", "manager read touched()"),
    ],
)
def test_forms_of_a_receiver(make_tree: Make, release: dict[str, str], text: str, found: str) -> None:
    release["distributed/kv_transfer/kv_connector/v1/offloading/events.py"] = f"""
from vllm.v1.kv_offload.base import OffloadingManager

Pair = tuple[OffloadingManager, OffloadingManager]
Looped = list[Looped]

def made() -> OffloadingManager: ...

def function(
    listed: list[OffloadingManager], mapped: dict[str, OffloadingManager], maybe: "OffloadingManager | None", other,
    pair: Pair,
):
    {text}
"""
    uses = uses_of(open_tree(make_tree(release)))
    mine = Uses(tuple(use for use in uses.found if ".events:" in use.at), ())
    assert _short(mine) == {found}
    assert uses.unresolved == ()


def test_a_receiver_that_is_not_known_is_told(make_tree: Make, release: dict[str, str]) -> None:
    """Silence here would let a call through that binds to nothing."""
    release[_SCHEDULER] += "\n\ndef later(thing, keys):\n    thing.prepare_store(keys)\n    thing.append(keys)\n"
    uses = uses_of(open_tree(make_tree(release)))
    assert [text.rpartition(": ")[2] for text in uses.unresolved] == ["thing.prepare_store"]
