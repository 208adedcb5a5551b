"""Binding: each way in which our side can fail to fit a release must be a finding that names the call site."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from xkv_matrix.binding import DEFAULT, OurClasses, bind
from xkv_matrix.check import open_tree
from xkv_matrix.connector import uses_of
from xkv_matrix.findings import Finding, MatrixError

Make = Callable[[dict[str, str]], Path]
_SCHEDULER = "distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py"


Judge = Callable[..., list[Finding]]


@pytest.fixture
def judge(make_tree: Make, make_ours: Make, release: dict[str, str], ours: dict[str, str]) -> Judge:
    """Bind the small release against our side, after `change(release, ours)`."""

    def bound(change: Callable[[dict[str, str], dict[str, str]], None] | None = None) -> list[Finding]:
        ours["manager.py"] += "    @property\n    def lock(self): ...\n"
        if change is not None:
            change(release, ours)
        reader = open_tree(make_tree(release))
        return bind(uses_of(reader), reader, OurClasses(make_ours(ours)))

    return bound


def test_everything_fits(judge: Judge) -> None:
    assert judge() == []


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        (
            "manager.py",
            "lookup(self, key, req_context)",
            "lookup(self, key)",
            "manager.lookup: called with (key, request)",
        ),
        ("manager.py", "lookup(self, key, req_context)", "lookup(self, key, *, req_context)", "manager.lookup: called"),
        ("manager.py", "lookup(self, key, req_context)", "lookup(self, key, a, b)", "manager.lookup: called"),
        ("manager.py", "lookup", "look_up", "manager.lookup: call, abstract in this release, and not ours"),
        ("manager.py", "def lookup(self, key, req_context): ...", "lookup = 1", "manager.lookup: called, but it is no"),
        (
            "manager.py",
            "    def lookup",
            "    @property\n    def lookup",
            "manager.lookup: called, but it is a property",
        ),
        (
            "worker.py",
            ", expedited=False",
            "",
            "worker.submit_load: called with (job_id, source, target, expedited=True)",
        ),
        ("worker.py", "XkvWorker(Half)", "XkvWorker", "worker.get_finished: call, abstract in this release"),
        ("spec.py", "*args, **kwargs", "vllm_config, kv_cache_config", "spec.__init__: called with (config)"),
    ],
)
def test_our_side_does_not_fit(judge: Judge, file: str, old: str, new: str, said: str) -> None:
    def change(_: dict[str, str], ours: dict[str, str]) -> None:
        assert old in ours[file]
        ours[file] = ours[file].replace(old, new)

    findings = judge(change)
    assert [finding.text.startswith(said) for finding in findings] == [True], findings


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("self.manager.brand_new(1)", "manager.brand_new: call of something that neither"),
        ("self.manager.brand_new", "manager.brand_new: read of something that neither"),
        ("self.manager.lookup(*keys)", "manager.lookup: called with * or **"),
        ("self.manager.lookup(1, 2, hurry=True)", "manager.lookup: called with (1, 2, hurry=True)"),
        ("request.lookup(1)", "a call on an object of unknown class"),
        ("f = self.manager.lookup", "manager.lookup: read of a method that is not called on the spot"),
        ("self._f = self.manager.has_pending_work", "manager.has_pending_work: read of a method that is not called"),
        ("functools.partial(self.manager.lookup, 1)()", "manager.lookup: read of a method that is not called"),
        ("getattr(self.manager, 'lookup')(1, 2, 3)", "manager.lookup: read of a method that is not called"),
        ("getattr(self.manager, 'lookup', None)", "manager.lookup: ask of a method that is not called on the spot"),
        ("getattr(self.manager, keys)(1, 2, 3)", "manager.<keys>: read of something that neither"),
        ("getattr(self.manager, keys, None)", "manager.<keys>: read of something that neither"),
    ],
)
def test_a_release_that_moves_on(judge: Judge, call: str, said: str) -> None:
    def change(release: dict[str, str], _: dict[str, str]) -> None:
        release[_SCHEDULER] += f"\n    def newer(self, keys, request):\n        {call}\n"

    (finding,) = judge(change)
    assert finding.text.startswith(said)
    assert "scheduler:OffloadingConnectorScheduler.newer:" in finding.where


@pytest.mark.parametrize(
    ("file", "name", "key"),
    [
        ("manager.py", "complete_store", "manager.complete_store: call"),
        ("manager.py", "has_pending_work", "manager.has_pending_work: call"),
        ("manager.py", "lock", "manager.lock: read"),
        ("worker.py", "shutdown", "worker.shutdown: call"),
        ("spec.py", "build_metric_definitions", "spec.build_metric_definitions: call"),
    ],
)
def test_a_method_of_ours_that_has_another_name_by_now(judge: Judge, file: str, name: str, key: str) -> None:
    """The release's base answers then, and everything goes on without us: the worst of all misfits."""

    def change(_: dict[str, str], ours: dict[str, str]) -> None:
        assert name in ours[file]
        ours[file] = ours[file].replace(f"def {name}(", f"def {name}_x(")

    (finding,) = judge(change)
    assert (finding.check, finding.text) == (DEFAULT, f"{key}, answered by vLLM's default, for ours has no such method")
    assert ".offloading." in finding.where


def test_what_every_class_has_needs_nobody_to_define_it(judge: Judge) -> None:
    """A release may name our class in its log."""

    def change(release: dict[str, str], _: dict[str, str]) -> None:
        metrics = "distributed/kv_transfer/kv_connector/v1/offloading/metrics.py"
        release[metrics] += "        self.name = spec_cls.__name__\n"

    assert judge(change) == []


def test_an_abstract_method_that_nobody_calls(judge: Judge) -> None:
    """A class of ours that lacks one cannot be made at all."""

    def change(release: dict[str, str], _: dict[str, str]) -> None:
        release["v1/kv_offload/base.py"] += "\n    @abstractmethod\n    def newest(self): ...\n"

    assert [str(finding) for finding in judge(change)] == [
        "binding: XkvOffloadingSpec.newest: spec.newest: abstract in this release, and not ours"
    ]


@pytest.mark.parametrize("place", ["offloading/newer.py", "newer/__init__.py"])
def test_a_module_that_nobody_looks_into(judge: Judge, place: str) -> None:
    """A connector that is split must not take its calls out of sight."""

    def change(release: dict[str, str], _: dict[str, str]) -> None:
        connectors = "distributed/kv_transfer/kv_connector/v1"
        text = "from vllm.v1.kv_offload.base import OffloadingManager\n"
        release[f"{connectors}/{place}"] = text
        release["v1/kv_offload/others_own.py"] = text  # makes its own, and calls none of ours

    (finding,) = judge(change)
    module = place.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    assert str(finding) == (
        f"binding: vllm.distributed.kv_transfer.kv_connector.v1.{module}: "
        "names our classes, and is no module whose calls are looked for"
    )


def test_a_base_module_that_moved_is_not_silence(judge: Judge) -> None:
    def change(release: dict[str, str], _: dict[str, str]) -> None:
        release["v1/elsewhere/base.py"] = release.pop("v1/kv_offload/base.py")

    texts = [finding.text for finding in judge(change)]
    assert [text.partition(".*")[0] for text in texts] == ["spec", "manager", "worker", "load_store_spec"]


def test_a_spec_that_is_made_from_something_else(judge: Judge) -> None:
    """Ours takes any arguments, so that binding alone would not see a third shape."""

    def change(release: dict[str, str], _: dict[str, str]) -> None:
        text = release["v1/kv_offload/base.py"].replace("__init__(self, config)", "__init__(self, config, role)")
        release["v1/kv_offload/base.py"] = text

    assert [
        finding.text.startswith("spec.__init__: a spec is made from config, role here") for finding in judge(change)
    ] == [True]


def test_our_classes_that_are_not_there(make_ours: Make, ours: dict[str, str], tmp_path: Path) -> None:
    del ours["worker.py"]
    with pytest.raises(MatrixError, match="no class XkvWorker in it"):
        OurClasses(make_ours(ours))
    with pytest.raises(MatrixError, match="no such folder"):
        OurClasses(tmp_path / "absent")
    with pytest.raises(MatrixError, match=r"worker\.py:1: "):
        OurClasses(make_ours({"worker.py": "class (:\n"}))
