"""What the manager counts reaches vLLM's own metrics endpoint: the release's real metric classes take all of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge, Histogram

from harness.shapes import Shape, mla
from harness.story import prompt
from xkv_offload.metrics import COUNTERS, metric_name

if TYPE_CHECKING:
    from harness.rig import Rig

pytest_plugins = ("harness.fixtures",)


def test_every_counter_of_a_served_engine_is_declared_and_taken(rig: Rig) -> None:
    # An undeclared name ends vLLM's API server by an assert.
    engine = rig.launch(Shape(groups=(mla(),), blocks=64, blocks_per_chunk=2))
    engine.serve("cold", prompt(tokens=16 * 8, seed=5))
    connector = engine.scheduler.connector
    engine.manager.lookup(
        bytes(36), SimpleNamespace(req_id="r")
    )  # vLLM took the served request's counters in its own step
    stats = connector.get_kv_connector_stats()
    assert stats is not None
    names = ["model_name", "engine"]
    shown = connector.build_prom_metrics(
        engine.scheduler.vllm_config, {Counter: Counter, Gauge: Gauge, Histogram: Histogram}, names, {0: ["m", "0"]}
    )
    shown.observe(stats.data, 0)
    assert shown.offloading_metrics[0, metric_name("lookup_misses"), ()]._value.get() == 1
    declared = {metric_name(name) for name, (_, counted_by) in COUNTERS.items() if counted_by == "manager"}
    assert declared <= set(shown._offloading_metric_metadata)
