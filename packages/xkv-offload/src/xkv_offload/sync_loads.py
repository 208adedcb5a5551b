"""Loads inside a step: vLLM's `sync_load_budget_bytes`.

Owns: whether vLLM may wait for loads before a forward pass, and where a failure of such a load could not be made good:
there the key is refused at start-up.
Must not know: how loads run or fail, other configuration.
"""

from collections.abc import Mapping

from xkv_compat.vllm_symbols import ConfigView
from xkv_store.errors import UserError

from .failures import Plan

KEY = "sync_load_budget_bytes"


def asked_for(view: ConfigView, features: Mapping[str, bool]) -> bool:
    """Whether vLLM may load inside a step. A release that cannot does not read the key."""
    return features["sync_loads"] and view.extra_config.get(KEY, 0) not in (0, "0")


def check_shape(view: ConfigView, features: Mapping[str, bool]) -> None:
    """Raise UserError for several groups or ranks.

    The only channel for such a failure is its blocks, which vLLM takes with one group. And a rank does not know that
    another's load has failed: it would store what it computed together with that one.
    """
    if not asked_for(view, features):
        return
    for count, noun in ((len(view.groups), "KV-cache groups"), (view.world_size, "ranks")):
        if count > 1:
            raise _refused(view, f"a load that fails inside a step cannot be made good with {count} {noun}")


def check_launch(
    view: ConfigView, features: Mapping[str, bool], *, plan: Plan, schedules_ahead: bool, failure_policy: str
) -> None:
    """Raise UserError where vLLM cannot be told of a failure at all, or would go on to say what followed from it.

    A step that is scheduled ahead reads the pages of the failed load, too; only a request that has ended by then is
    not believed.
    """
    if not asked_for(view, features):
        return
    if plan.channel != "block_errors":
        raise _refused(view, plan.reason)
    if schedules_ahead and failure_policy != "fail":
        raise _refused(
            view,
            f"with async scheduling, kv_load_failure_policy = {failure_policy!r} lets vLLM answer with what it "
            "computed from a load that had failed: set 'fail' or switch async scheduling off",
        )


def _refused(view: ConfigView, reason: str) -> UserError:
    return UserError(f"{KEY} = {view.extra_config[KEY]!r} is refused: {reason}; or leave the key out")
