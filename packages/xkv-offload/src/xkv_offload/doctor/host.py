"""The vLLM that was found: its features, what falls back for want of one, and its known faults.

Owns: the table of faults by the feature that shows them, and what each costs an engine.
Must not know: versions, how a feature is found, how an engine is configured.
"""

import contextlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from xkv_compat.errors import BadInput, BrokenVLLM
from xkv_compat.features import Features, detect_live, detect_source
from xkv_compat.probes import FEATURES
from xkv_store.doctor.findings import Finding, fault, note, ok, warning
from xkv_store.errors import UserError

Present = Mapping[str, bool]


FALL_BACKS = frozenset(
    {
        "abort_safe",
        "block_error_reporting",
        "blocks_per_chunk_key",
        "current_vllm_config",
        "finish_commit_clamp",
        "group_window_info",
        "layer_specs",
        "manager_lock",
        "replicated_store",
        "request_error_reporting",
        "reset_fence",
        "reset_safe",
        "stable_none_hash_default",
        "state_hits_agree",
        "tagged_hash_extras",
        "window_store_mask",
    }
)
"""Features whose absence somebody can notice; what stands in for the others does the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFault:
    """A fault of vLLM itself, or a limit that it sets, and the features that show it."""

    name: str
    shows: Callable[[Present], bool]
    what: str
    follows: str
    remedy: str
    is_handled: bool = True  # xkv refuses it or works around it: worth knowing, and no more


KNOWN_FAULTS: tuple[KnownFault, ...] = (
    KnownFault(
        name="aborts",
        shows=lambda has: not has["abort_safe"],
        what="an abort of a request that is queued or loading ends this vLLM, with any connector",
        follows="a client that hangs up at the wrong moment ends the engine; several ranks verify before they hit",
        remedy="use a vLLM that has the feature abort_safe; until then let clients not cancel requests",
        is_handled=False,
    ),
    KnownFault(
        name="resets",
        shows=lambda has: not has["reset_safe"],
        what="a connector's reset while one of its transfers is under way ends this vLLM, or leaves a request waiting",
        follows="reset_prefix_cache with reset_connector may end the engine",
        remedy="reset only while nothing is served",
        is_handled=False,
    ),
    KnownFault(
        name="junk tail",
        shows=lambda has: not has["finish_commit_clamp"],
        what="with offload_prompt_only=false this vLLM stores a chunk whose last token was never computed",
        follows="it is refused at start-up: answers are not stored",
        remedy="leave offload_prompt_only out",
    ),
    KnownFault(
        name="states",
        shows=lambda has: not has["state_hits_agree"],
        what="this vLLM may begin a request at a token for which it has attention's pages and no Mamba state",
        follows="models with Mamba layers beside others are refused at start-up",
        remedy="use a vLLM that has the feature state_hits_agree for such models",
    ),
    KnownFault(
        name="failed loads",
        shows=lambda has: not has["request_error_reporting"],
        what="this vLLM hears of a failed load by its blocks alone, and survives that with one full-attention group",
        follows="other models' hits are verified before they are given: xkv.staged_bytes bounds what a prompt restores",
        remedy="nothing for one group; else xkv.staged_bytes of at least what a long prompt's chunks take",
    ),
    KnownFault(
        name="loads in a step",
        shows=lambda has: has["sync_loads"],
        what="with sync_load_budget_bytes this vLLM loads inside a step, where only a failure's blocks are heard of",
        follows="the key is refused for several KV-cache groups or ranks",
        remedy="leave sync_load_budget_bytes out",
    ),
    KnownFault(
        name="window holes",
        shows=lambda has: not has["group_window_info"],
        what="this vLLM offers chunks of sliding-window groups with blocks missing",
        follows="with blocks_per_chunk above 1 these are not stored, and hits of such models are shorter",
        remedy="blocks_per_chunk 1 for models with sliding windows beside full attention",
    ),
    KnownFault(
        name="drafts",
        shows=lambda has: not has["group_ids"],
        what="with a draft model whose layers have no group of their own, this vLLM takes every group for a draft's",
        follows="the last chunk of every hit is left out; with Mamba layers beside attention there is no hit at all",
        remedy="nothing, or a vLLM that has the feature group_ids",
    ),
    KnownFault(
        name="reset_prefix_cache",
        shows=lambda _has: True,
        what="vLLM's plain reset_prefix_cache never reaches a connector",
        follows="what is on the card is still hit after it",
        remedy="its option reset_connector",
    ),
)


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What was found; `features` None where there is no vLLM (`absent`) or it is broken (`error`)."""

    features: Features | None
    error: str = ""
    absent: bool = False


def gather_host(source: Path | None) -> HostFacts:
    """Look at the tree, or at the vLLM of this Python. Raises UserError for a tree that is none."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # importing some releases logs to stdout
            return HostFacts(detect_live() if source is None else detect_source(source))
    except BadInput as error:
        if source is not None:
            raise UserError(f"--source {source}: {error}") from error
        return HostFacts(None, str(error), absent=True)
    except BrokenVLLM as error:
        return HostFacts(None, str(error))


def examine_host(facts: HostFacts) -> list[Finding]:
    """Whether xkv works with it, and what falls back and why."""
    features = facts.features
    if features is None:
        if facts.absent:
            return [
                note(
                    "vLLM",
                    "no vLLM is installed in this Python",
                    "its features and faults were not looked at",
                    "run xkv doctor in vLLM's environment, or name a source tree: --source TREE",
                )
            ]
        return [fault("vLLM", facts.error, "engines do not start", "install this vLLM again")]
    if not features.supported:
        lines = "; ".join(features.unmet)
        return [
            fault(
                "vLLM",
                f"{features.where} lacks what xkv cannot do without: {lines}",
                "the engine does not start",
                "use a vLLM with the KV offloading framework (vllm/v1/kv_offload), or adapt the fork's copy of xkv",
            )
        ]
    count = sum(features.values())
    found = [ok("vLLM", f"{features.where}: {count} of {len(features)} features")]
    rest = 0
    for feature in FEATURES:
        if features[feature.name]:
            continue
        if feature.name in FALL_BACKS:
            lacks = ", ".join(features.missing[feature.name])
            found.append(note("fall-back", f"{feature.name}: {feature.absent} (no {lacks})"))
        rest += feature.name not in FALL_BACKS
    if rest:
        what = f"{rest} other features are not there, which costs nothing"
        found.append(note("fall-back", what, "", "python -m xkv_compat report"))
    return found


def examine_faults(features: Present) -> list[Finding]:
    """The known faults of a vLLM with these features."""
    return [
        (note if one.is_handled else warning)("known fault", one.what, one.follows, one.remedy)
        for one in KNOWN_FAULTS
        if one.shows(features)
    ]
