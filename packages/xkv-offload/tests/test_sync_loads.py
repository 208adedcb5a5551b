"""Where loads inside a step are refused: let through, a load that fails there ends in wrong answers."""

from typing import Any

import pytest

from xkv_compat.vllm_symbols import ConfigView, GroupView
from xkv_offload.failures import Plan
from xkv_offload.sync_loads import asked_for, check_launch, check_shape
from xkv_store.errors import UserError

FEATURES = {"sync_loads": True}
TOLD = Plan("block_errors", "")
GROUP = GroupView(32, ("a",), 0, None)


def view(budget: Any = 1000, **changes: Any) -> ConfigView:
    extra = {} if budget is None else {"sync_load_budget_bytes": budget}
    fields: dict[str, Any] = {
        "engine_id": "e",
        "extra_config": extra,
        "model": "m",
        "cache_dtype": "float32",
        "groups": (GROUP,),
        "tokens_per_hash": 32,
        "blocks_per_chunk": 1,
        "rank": 0,
        "world_size": 1,
        "tp_size": 1,
        "pp_size": 1,
        "pcp_size": 1,
        "dcp_size": 1,
        "data_parallel_index": 0,
        "replicated_hint": None,
        "canonical_layout": False,
        "kv_cache_layout": None,
        "kv_bytes_per_block": None,
    }
    return ConfigView(**{**fields, **changes})


@pytest.mark.parametrize(("budget", "wanted"), [(None, False), (0, False), ("0", False), (1, True), ("1000", True)])
def test_it_is_asked_for_by_a_budget_that_vllm_reads(budget: Any, wanted: bool) -> None:
    assert asked_for(view(budget), FEATURES) == wanted
    assert not asked_for(view(budget), {"sync_loads": False})


@pytest.mark.parametrize(
    ("changes", "words"), [({"groups": (GROUP, GROUP)}, "with 2 KV-cache groups"), ({"world_size": 4}, "with 4 ranks")]
)
def test_several_groups_or_ranks_are_refused(changes: Any, words: str) -> None:
    with pytest.raises(UserError, match=f"sync_load_budget_bytes = 1000 is refused: .*{words}.*leave the key out"):
        check_shape(view(**changes), FEATURES)
    check_shape(view(0, **changes), FEATURES)
    check_shape(view(**changes), {"sync_loads": False})
    check_shape(view(), FEATURES)


def test_a_failure_that_cannot_be_told_is_refused_with_its_reason() -> None:
    none = Plan("verified", "recomputing is unsound")
    with pytest.raises(UserError, match="is refused: recomputing is unsound"):
        check_launch(view(), FEATURES, plan=none, schedules_ahead=False, failure_policy="fail")
    check_launch(view(0), FEATURES, plan=none, schedules_ahead=True, failure_policy="recompute")
    check_launch(view(), {"sync_loads": False}, plan=none, schedules_ahead=True, failure_policy="recompute")


@pytest.mark.parametrize(
    ("schedules_ahead", "policy", "is_refused"),
    [(True, "recompute", True), (True, "fail", False), (False, "recompute", False), (False, "fail", False)],
)
def test_recomputing_is_refused_where_a_step_runs_ahead(schedules_ahead: bool, policy: str, is_refused: bool) -> None:
    def launch() -> None:
        check_launch(view(), FEATURES, plan=TOLD, schedules_ahead=schedules_ahead, failure_policy=policy)

    if not is_refused:
        launch()
        return
    with pytest.raises(UserError, match="async scheduling, kv_load_failure_policy = 'recompute'"):
        launch()
