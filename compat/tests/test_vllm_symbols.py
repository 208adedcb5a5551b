"""The door to vLLM, on made-up trees: what a spec is handed, and what is said when it is not there."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]
Make = Callable[[dict[str, str]], Path]


def _ok(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr


def test_framework(make_tree: Make, full_files: dict[str, str], run_live: Run) -> None:
    code = """
from xkv_compat import vllm_symbols
found = vllm_symbols.framework()
import vllm.v1.kv_offload.base as base
assert found.OffloadingSpec is base.OffloadingSpec
assert found.LookupResult is base.LookupResult
assert found.OffloadingWorker is base.OffloadingWorker
assert found.TransferResult is base.TransferResult
assert found.CacheHitSource is None
assert isinstance(vllm_symbols.default_request_context(), base.RequestOffloadingContext)
assert vllm_symbols.offloading_connector_class().__name__ == "OffloadingConnector"
assert vllm_symbols.vllm_version_text() == "1.2.3+made"
"""
    _ok(run_live(make_tree(full_files), code))


def test_framework_with_handlers_and_bool_lookups(make_tree: Make, full_files: dict[str, str], run_live: Run) -> None:
    base = full_files["v1/kv_offload/base.py"]
    for name in ("LookupResult", "OffloadingWorker", "TransferResult"):
        base = base.replace(f"class {name}", f"class Later{name}")
    code = """
from xkv_compat import vllm_symbols
found = vllm_symbols.framework()
assert (found.LookupResult.HIT, found.LookupResult.MISS) == (True, False)
assert found.LookupResult.RETRY is None and found.LookupResult.HIT_PENDING is None
assert found.OffloadingWorker.__name__ == "OffloadingHandler"
assert found.TransferResult.__module__ == "vllm.v1.kv_offload.worker.worker"
"""
    _ok(run_live(make_tree({**full_files, "v1/kv_offload/base.py": base}), code))


@pytest.mark.parametrize("has_handlers", [True, False])
def test_workers_of_a_connector(make_tree: Make, full_files: dict[str, str], run_live: Run, has_handlers: bool) -> None:
    """Where a load failed is asked of them: one that is not found is a failure that nobody hears of."""
    base = full_files["v1/kv_offload/base.py"]
    if has_handlers:
        base = base.replace("class OffloadingWorker", "class LaterOffloadingWorker")
    code = f"""
from types import SimpleNamespace as Some
from xkv_compat.vllm_symbols import connector_workers
worker = object()
side = Some(handlers={{worker}}) if {has_handlers} else worker
assert connector_workers(Some(connector_worker=Some(worker=side))) == (worker,)
assert connector_workers(Some(connector_worker=Some(worker=None))) == ()
assert connector_workers(Some(connector_worker=None)) == ()
"""
    _ok(run_live(make_tree({**full_files, "v1/kv_offload/base.py": base}), code))


def test_the_manager_of_a_connector(make_tree: Make, full_files: dict[str, str], run_live: Run) -> None:
    code = """
from types import SimpleNamespace as Some
from xkv_compat.vllm_symbols import connector_manager
manager = object()
assert connector_manager(Some(connector_scheduler=Some(manager=manager))) is manager
assert connector_manager(Some(connector_scheduler=None)) is None
"""
    _ok(run_live(make_tree(full_files), code))


@pytest.mark.parametrize(
    ("symbols", "fields", "said"),
    [
        ("", "medium: str", "{'medium': 'STORAGE'}"),
        ("class Locality(Enum):\n    LOCAL = 'here'\n", "medium: str", "{'medium': 'STORAGE'}"),
        (
            "class Locality(Enum):\n    LOCAL = 'here'\n",
            "medium: str\n    locality: object = None",
            "{'medium': 'STORAGE', 'locality': 'here'}",
        ),
        (
            "class Medium(Enum):\n    STORAGE = 'disk'\n",
            "medium: Medium\n    removal_expected: bool = False",
            "{'medium': 'disk', 'removal_expected': True}",
        ),
    ],
)
def test_an_event_says_what_a_release_can_hear(  # noqa: PLR0917  three fixtures, three parameters
    make_tree: Make, full_files: dict[str, str], run_live: Run, symbols: str, fields: str, said: str
) -> None:
    """A text where a release wants its enumeration ends the engine, and so does a field that it does not have."""
    base = full_files["v1/kv_offload/base.py"]
    base = base.replace("class OffloadingEvent", "class OtherEvent")
    base = base.replace("from .media import", "# ")
    base += f"""
from dataclasses import dataclass
from enum import Enum
{symbols}
@dataclass
class OffloadingEvent:
    keys: list
    removed: bool
    {fields}
"""
    code = f"""
from xkv_compat.vllm_symbols import event_maker
stored, removed = event_maker()((b"key",), False), event_maker()([b"key"], True)
assert (stored.keys, stored.removed, removed.removed) == ([b"key"], False, True)
told = {{name: getattr(value, "value", value) for name, value in vars(stored).items()}}
del told["keys"], told["removed"]
assert told == {said}, told
assert not vars(removed).get("removal_expected", False)
"""
    _ok(run_live(make_tree({**full_files, "v1/kv_offload/base.py": base}), code))


def test_without_events_there_is_nothing_to_make(make_tree: Make, full_files: dict[str, str], run_live: Run) -> None:
    base = full_files["v1/kv_offload/base.py"].replace("class OffloadingEvent", "class OtherEvent")
    code = """
from types import SimpleNamespace as Some
from xkv_compat.vllm_symbols import event_maker, kv_events_are_on
assert event_maker() is None
assert [kv_events_are_on(one) for one in (
    Some(), Some(kv_events_config=None), Some(kv_events_config=Some(enable_kv_cache_events=False)),
    Some(kv_events_config=Some(enable_kv_cache_events=True)),
)] == [False, False, False, True]
"""
    _ok(run_live(make_tree({**full_files, "v1/kv_offload/base.py": base}), code))


def test_an_enum_under_another_name_is_not_taken_for_bools(
    make_tree: Make, full_files: dict[str, str], run_live: Run
) -> None:
    """Bools given to a release that wants an enum are no error there: nothing would ever hit."""
    base = full_files["v1/kv_offload/base.py"].replace("LookupResult", "LookupAnswer")
    code = """
from xkv_compat import UnsupportedVLLM, vllm_symbols
try:
    vllm_symbols.framework()
except UnsupportedVLLM as error:
    assert error.missing == ("LookupResult: not in vllm.v1.kv_offload.base",)
else:
    raise AssertionError
"""
    _ok(run_live(make_tree({**full_files, "v1/kv_offload/base.py": base}), code))


def test_everything_missing_is_listed_at_once(make_tree: Make, run_live: Run) -> None:
    code = """
from xkv_compat import UnsupportedVLLM, vllm_symbols
for ask in (vllm_symbols.framework, vllm_symbols.offloading_connector_class):
    try:
        ask()
    except UnsupportedVLLM as error:
        print(len(error.missing), "vllm.v1.kv_offload.worker.worker" in str(error))
"""
    done = run_live(make_tree({}), code)
    _ok(done)
    assert done.stdout.splitlines() == ["14 True", "1 False"]


@pytest.mark.parametrize("module", ["asks", "variable", "none"])
def test_current_vllm_config(make_tree: Make, full_files: dict[str, str], run_live: Run, module: str) -> None:
    """A worker must get it and the scheduler None; a raise there would end the engine at start-up."""
    text = {
        "asks": full_files["config/vllm.py"],
        "variable": "_current_vllm_config = None\n",
        "none": "",
    }[module]
    code = f"""
from xkv_compat.vllm_symbols import current_vllm_config
assert current_vllm_config() is None
import vllm.config.vllm as there
there._current_vllm_config = "set"
assert current_vllm_config() == (None if {module == "none"} else "set") or {module == "none"}
"""
    _ok(run_live(make_tree({**full_files, "config/vllm.py": text}), code))


@pytest.mark.parametrize("wanted", [True, False])
def test_whether_steps_are_scheduled_ahead(
    make_tree: Make, full_files: dict[str, str], run_live: Run, wanted: bool
) -> None:
    """Taken for off, a failed load inside a step is answered with what was computed from it; unresolved is on."""
    code = f"""
from types import SimpleNamespace as Some
from xkv_compat.vllm_symbols import schedules_ahead
for given in (True, None) if {wanted} else (False,):
    assert schedules_ahead(Some(scheduler_config=Some(async_scheduling=given))) == {wanted}
"""
    _ok(run_live(make_tree(full_files), code))


@pytest.mark.parametrize("has_default", [True, False])
def test_none_hash(make_tree: Make, full_files: dict[str, str], run_live: Run, has_default: bool) -> None:
    """Stable taken for random stores nothing; random taken for stable fills the card with what never hits."""
    if not has_default:
        hashes = full_files["v1/core/kv_cache_utils.py"].replace("DEFAULT_NONE_HASH_SEED", "OTHER")
        full_files["v1/core/kv_cache_utils.py"] = hashes
    code = f"""
import os
from xkv_compat.vllm_symbols import none_hash_is_stable
os.environ.pop("PYTHONHASHSEED", None)
answers = [none_hash_is_stable(name) for name in ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")]
assert answers == ([True, True, False, False] if {has_default} else [False] * 4), answers
os.environ["PYTHONHASHSEED"] = "random"
assert all(none_hash_is_stable(name) for name in ("sha256", "xxhash"))
"""
    _ok(run_live(make_tree(full_files), code))


_OFFLOADING_CONFIG = """
from dataclasses import dataclass, field

@dataclass
class OffloadingGroupConfig:
    tokens_per_block: int
    layer_names: tuple

@dataclass
class Model:
    name: str = "m"
    dtype: str = "torch.float32"

@dataclass
class Pages:
    tokens_per_hash: int = 32
    blocks_per_chunk: int = 16

@dataclass
class Parallel:
    rank: int = 1
    world_size: int = 2
    tp_size: int = 2
    pp_size: int = 1
    pcp_size: int = 1
    dcp_size: int = 1
    data_parallel_index: int = 3

@dataclass
class OffloadingConfig:
    groups: tuple
    worker_kv_bytes_per_block: int = 0
    extra_config: dict = field(default_factory=dict)
    engine_id: str = "e"
    model: Model = field(default_factory=Model)
    cache: Pages = field(default_factory=Pages)
    parallel: Parallel = field(default_factory=Parallel)
"""


def test_config_view_of_an_offloading_config(make_tree: Make, full_files: dict[str, str], run_live: Run) -> None:
    code = """
from xkv_compat.vllm_symbols import offloading_config_view
from xkv_compat import UnsupportedVLLM
from vllm.v1.kv_offload.config import OffloadingConfig, OffloadingGroupConfig
config = OffloadingConfig((OffloadingGroupConfig(32, ("a", "b")), OffloadingGroupConfig(64, ("c",))))
view = offloading_config_view((config,), {})
assert view == offloading_config_view((), {"config": config})
assert [(g.tokens_per_block, g.layer_names, g.group_id) for g in view.groups] == [
    (32, ("a", "b"), 0), (64, ("c",), 1)]
assert (view.engine_id, view.model, view.cache_dtype) == ("e", "m", "float32")
assert (view.tokens_per_hash, view.blocks_per_chunk, view.rank, view.world_size) == (32, 16, 1, 2)
assert (view.replicated_hint, view.kv_cache_layout, view.kv_bytes_per_block) == (None, None, None)
try:
    offloading_config_view((1, 2, 3), {})
except UnsupportedVLLM as error:
    assert "3 positional arguments" in str(error)
else:
    raise AssertionError
"""
    _ok(run_live(make_tree({**full_files, "v1/kv_offload/config.py": _OFFLOADING_CONFIG}), code))


def test_config_view_of_a_vllm_config(make_tree: Make, full_files: dict[str, str], run_live: Run) -> None:
    """The older shape: both views must say the same of the same engine, or its objects would be missed."""
    base = full_files["v1/kv_offload/base.py"].replace("__init__(self, config)", "__init__(self, vllm_config, kv)")
    full_files["v1/core/kv_cache_utils.py"] += "\ndef resolve_kv_cache_block_sizes(pages, config): return 32, 16\n"
    code = """
from types import SimpleNamespace as Some
from xkv_compat.vllm_symbols import offloading_config_view
parallel = Some(decode_context_parallel_size=2, prefill_context_parallel_size=1, rank=0, world_size=2,
                tensor_parallel_size=2, pipeline_parallel_size=1, data_parallel_index=0)
config = Some(kv_transfer_config=Some(kv_connector_extra_config={"block_size": 128}, engine_id="e"),
              parallel_config=parallel, model_config=Some(model="m"), cache_config=Some(cache_dtype="auto"))
pages = Some(kv_cache_groups=[Some(kv_cache_spec=Some(block_size=16), layer_names=["a"])])
view = offloading_config_view((config, pages), {})
assert view == offloading_config_view((config,), {"kv_cache_config": pages})
assert (view.groups[0].tokens_per_block, view.blocks_per_chunk, view.tokens_per_hash) == (32, 4, 16)
assert (view.cache_dtype, view.dcp_size) == ("auto", 2)
config.kv_transfer_config.kv_connector_extra_config.clear()
assert offloading_config_view((config, pages), {}).blocks_per_chunk == 1
config.kv_transfer_config.kv_connector_extra_config["block_size"] = "64"
assert offloading_config_view((config, pages), {}).blocks_per_chunk == 2
pages.kv_cache_groups.clear()
assert offloading_config_view((config, pages), {}).blocks_per_chunk == 1  # vLLM's own assertion follows
"""
    _ok(run_live(make_tree({**full_files, "v1/kv_offload/base.py": base}), code))


_SPECS = """
from dataclasses import dataclass
from enum import Enum

class Quant(Enum):
    NONE = 0

@dataclass(frozen=True)
class KVCacheSpec:
    block_size: int

@dataclass(frozen=True)
class AttentionSpec(KVCacheSpec):
    num_kv_heads: int = 2
    head_size: int = 64
    dtype: str = "torch.float16"
    quant: Quant = Quant.NONE
    scale: int = 1
    @property
    def page_size_bytes(self):
        return self.block_size * self.num_kv_heads * self.head_size * 4 * self.scale

class FullAttentionSpec(AttentionSpec): ...
class MLAAttentionSpec(FullAttentionSpec): ...
class Derived(MLAAttentionSpec): ...

@dataclass(frozen=True)
class SlidingWindowSpec(AttentionSpec):
    sliding_window: int = 256

@dataclass(frozen=True)
class MambaSpec(KVCacheSpec):
    shapes: tuple = ((1, 2), (3,))
    page_size_bytes: int = 100
"""


def test_layer_specs(make_tree: Make, full_files: dict[str, str], run_live: Run) -> None:
    """Kinds decide what is replicated and which failures are survivable: an MLA's subclass is no MLA here."""
    code = """
from dataclasses import replace
from types import SimpleNamespace as Some
import vllm.v1.kv_cache_interface as specs
from xkv_compat.vllm_symbols import layer_specs

class Implementation:
    @classmethod
    def customize_spec(cls, spec):
        return replace(spec, scale=3)

def layer(spec, **more):
    return Some(get_kv_cache_spec=lambda config: spec, **more)

def config(**layers):
    return Some(compilation_config=Some(static_forward_context=layers))

assert layer_specs(config()) is None
assert layer_specs(config(moe=Some())) is None
facts = layer_specs(config(
    full=layer(specs.FullAttentionSpec(32)),
    custom=layer(specs.FullAttentionSpec(32), get_attn_backend=lambda: Implementation),
    plain=layer(specs.FullAttentionSpec(32), get_attn_backend=lambda: object),
    mla=layer(specs.MLAAttentionSpec(32)), derived=layer(specs.Derived(32)),
    window=layer(specs.SlidingWindowSpec(32)), mamba=layer(specs.MambaSpec(64), get_attn_backend=None),
    shared=layer(specs.FullAttentionSpec(32), kv_sharing_target_layer_name="full"),
    encoder=layer(None), moe=Some(),
))
assert list(facts) == ["full", "custom", "plain", "mla", "derived", "window", "mamba"]
full = facts["full"]
assert (full.kind, full.block_size, full.page_size_bytes, full.dtype) == ("FullAttentionSpec", 32, 16384, "float16")
assert facts["custom"].page_size_bytes == 3 * full.page_size_bytes and facts["plain"] == full
assert [name for name, fact in facts.items() if fact.is_mla] == ["mla"]
assert [name for name, fact in facts.items() if fact.is_full_attention] == ["full", "custom", "plain", "mla", "derived"]
assert [name for name, fact in facts.items() if fact.is_sliding_window] == ["window"]
assert facts["window"].sliding_window == 256
mamba = facts["mamba"]
assert mamba.is_mamba and mamba.head_size is None and mamba.dtype is None and mamba.page_size_bytes == 100
assert ("shapes", "((1, 2), (3))") in mamba.details and ("quant", "NONE") in full.details
"""
    _ok(run_live(make_tree({**full_files, "v1/kv_cache_interface.py": _SPECS}), code))
