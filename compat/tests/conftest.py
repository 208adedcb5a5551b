"""A small source tree in which every probe of the table finds what it looks for.

Owns: the tree's text and the fixtures that write it. Must not know: how the readers work.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

_CONNECTOR = "distributed/kv_transfer/kv_connector/v1"

# Module path below vllm/ → text. Packages that are not named here get an empty __init__.py.
FULL_TREE: dict[str, str] = {
    "version.py": '__version__ = "1.2.3+made"\n',
    "v1/kv_offload/base.py": """
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from .media import Locality, Medium  # names that are re-exported count as this module's

if TYPE_CHECKING:
    from nowhere import OnlyForTypes

class LookupResult(Enum):
    MISS = 0
    HIT = 1
    HIT_PENDING = 2
    RETRY = 3

class OffloadPolicy(Enum):
    CHUNK_LEVEL = "chunk"
    BLOCK_LEVEL = "block"

@dataclass
class RequestOffloadingContext:
    policy: object = None

@dataclass
class ReqContext:
    req_id: str
    _state: dict = field(default_factory=dict)
    def get_state(self, cls): ...
    def get_offload_key_position(self, key): ...

class LoadStoreSpec(ABC):
    @staticmethod
    @abstractmethod
    def medium(): ...

class GPULoadStoreSpec: ...

class PrepareStoreOutput(NamedTuple):
    keys_to_store: list

@dataclass
class OffloadingEvent:
    keys: list
    locality: object = None
    ownership: object = None

class OffloadingMetricMetadata: ...

class OffloadingCounterMetadata(OffloadingMetricMetadata): ...

@dataclass
class OffloadingGaugeMetadata(OffloadingMetricMetadata):
    multiprocess_mode: str = ""

class OffloadingHistogramMetadata(OffloadingMetricMetadata): ...

def get_offload_block_hash(key): ...

def get_offload_group_idx(key): ...

class OffloadingManager(ABC):
    def on_schedule_end(self, context): ...
    def get_load_source(self, key, req_context): ...
    def on_reset_flushed(self): ...
    def config_info(self): ...
    @property
    def lock(self): ...

@dataclass
class CanonicalKVCacheRef:
    tensor_idx: int
    mapping: object = None

class CanonicalKVCaches: ...

class TransferResult: ...

class OffloadingWorker(ABC):
    @abstractmethod
    def submit_load(self, job_id, src_spec, dst_spec, expedited=False): ...

class SpecRoot(ABC):
    @abstractmethod
    def get_worker(self, caches): ...
    @abstractmethod
    def get_handlers(self, caches): ...

class OffloadingSpec(SpecRoot):
    def __init__(self, config):
        self.replicated_layout: bool = False
    @classmethod
    def config_info_keys(cls, extra_config): ...
""",
    "v1/kv_offload/media.py": """
from enum import Enum

class Medium(Enum):
    STORAGE = 1

class Locality(Enum):
    LOCAL = 1
""",
    "v1/kv_offload/worker/worker.py": "class OffloadingHandler: ...\n\nclass TransferResult: ...\n",
    "v1/kv_offload/config.py": """
from dataclasses import dataclass

@dataclass
class OffloadingGroupConfig:
    group_id: int
    sliding_window_size_in_chunks: int | None = None

@dataclass
class OffloadingConfig:
    kv_cache_layout: str | None = None
""",
    "v1/kv_offload/factory.py": "class OffloadingSpecFactory: ...\n",
    f"{_CONNECTOR}/base.py": """
class KVConnectorTransferResults: ...

class KVConnectorBase_V1:
    def get_block_ids_with_load_errors(self): ...
""",
    f"{_CONNECTOR}/offloading_connector.py": """
class OffloadingConnector:
    def register_cross_layers_kv_cache(self, cache): ...
""",
    f"{_CONNECTOR}/offloading/scheduler.py": """
class RequestOffloadState:
    def storable_chunks(self, group_config, group_state): ...

class OffloadingConnectorScheduler:
    def _touch(self):
        self.manager.touch([], None)

    def _reachable(self, group_config):
        return group_config.manager_cls.reachable_block_mask(0, 1)
""",
    f"{_CONNECTOR}/offloading/common.py": """
from typing import NamedTuple

class TransferJob(NamedTuple):
    req_id: str
    sync: bool
""",
    f"{_CONNECTOR}/offloading/config.py": """
def build_offloading_config(vllm_config):
    return vllm_config.get("blocks_per_chunk"), "auto"
""",
    f"{_CONNECTOR}/offloading/metrics.py": """
class OffloadingConnectorStats:
    def set_info(self, name): ...
    def increase_counter(self, name, value=1, labelvalues=()): ...
    def observe_histogram(self, name, value, labelvalues=()): ...
""",
    "v1/core/kv_cache_utils.py": '''
DEFAULT_NONE_HASH_SEED = "seed"

def _gen_lora_extra_hash_keys(request):
    """Tagged with "lora"."""
    return [("lora", request.lora_name)]
''',
    "v1/core/kv_cache_manager.py": """
class KVCacheManager:
    def get_computed_blocks_for_connector(self, request): ...
""",
    "v1/core/sched/scheduler.py": """
class Scheduler:
    def _handle_failed_recving(self): ...
    def schedule(self, request):
        return self.kv_cache_manager.get_computed_blocks_for_connector(request)
""",
    "v1/core/sched/output.py": """
from dataclasses import dataclass

@dataclass
class SchedulerOutput:
    has_sync_kv_loads: bool = False
""",
    "v1/kv_cache_interface.py": """
class FullAttentionSpec: ...

class MLAAttentionSpec: ...

class MambaSpec: ...
""",
    "v1/attention/backend.py": """
class AttentionBackend:
    @classmethod
    def customize_spec(cls, spec): ...
""",
    "config/vllm.py": """
_current_vllm_config = None

def get_current_vllm_config_or_none():
    return _current_vllm_config
""",
    "config/cache.py": """
from dataclasses import dataclass

@dataclass
class CacheConfig:
    calculate_kv_scales: bool = False
""",
    "config/compilation.py": """
from dataclasses import dataclass, field

@dataclass
class CompilationConfig:
    static_forward_context: dict = field(default_factory=dict)
""",
    "model_executor/layers/attention_layer_base.py": """
class AttentionLayerBase:
    def get_kv_cache_spec(self, vllm_config): ...
""",
}


def _write_tree(folder: Path, files: dict[str, str]) -> Path:
    """Write the tree below ``folder/vllm`` with an __init__.py in every package; returns ``folder``."""
    for name, text in {"__init__.py": "", **files}.items():
        path = folder / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        for package in path.parents:
            if package == folder:
                break
            (package / "__init__.py").touch()
    return folder


@pytest.fixture
def full_files() -> dict[str, str]:
    return dict(FULL_TREE)


@pytest.fixture
def write_tree() -> Callable[[Path, dict[str, str]], Path]:
    return _write_tree


@pytest.fixture
def make_tree(tmp_path: Path) -> Callable[[dict[str, str]], Path]:
    def make(files: dict[str, str]) -> Path:
        return _write_tree(tmp_path / "tree", files)

    return make


@pytest.fixture
def run_live() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python code in a process of its own, in which ``import vllm`` finds the given tree."""

    def run(tree: Path | None, code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
        source = Path(__file__).resolve().parents[1] / "src"
        search = [str(path) for path in (*([tree] if tree else []), *(paths or (source,)))]
        prelude = f"import sys; sys.path[:0] = {search!r}\n"
        return subprocess.run(
            [sys.executable, "-I", "-c", prelude + code],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run
