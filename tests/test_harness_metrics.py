"""What manager and ranks count and measure reaches vLLM's own metrics endpoint: the release's real classes take it."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from harness import release
from harness.shapes import Shape, full, mla
from harness.story import prompt
from xkv_offload.metrics import COUNTERS, HISTOGRAMS, LABELLED, METRIC_PREFIX, metric_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from harness.engine import Engine
    from harness.rig import Rig

pytest_plugins = ("harness.fixtures",)

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
ENGINE_LABELS = {"model_name": "m", "engine": "0"}
SHAPE = Shape(groups=(full(),), blocks=64, blocks_per_chunk=2)
TOKENS = prompt(tokens=16 * 8, seed=5)
CHUNK_BYTES = SHAPE.chunk_bytes(0)


class Endpoint:
    """VLLM's metrics of one engine, as its API server has them: what the engine core says goes over the wire first."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._connector = engine.scheduler.connector
        self._registry = CollectorRegistry()
        kinds = {kind: self._registered(kind) for kind in (Counter, Gauge, Histogram)}
        self._shown = self._connector.build_prom_metrics(
            engine.scheduler.vllm_config, kinds, list(ENGINE_LABELS), {0: list(ENGINE_LABELS.values())}
        )

    def _registered(self, kind: Any) -> Any:
        def make(**options: Any) -> Any:
            return kind(**options, registry=self._registry)

        return make

    def take(self) -> None:
        """Ask the connector, as vLLM's scheduler does after a step."""
        stats = self._connector.get_kv_connector_stats()
        if stats is None:
            return
        wire = importlib.import_module("vllm.v1.serial_utils")  # not sooner: the harness says on which platform
        sent = wire.MsgpackEncoder().encode(stats.data)
        data = wire.MsgpackDecoder(dict[str, Any]).decode(sent)
        again = self._connector.build_kv_connector_stats(data)
        assert again is not None
        again.reduce()  # what vLLM's log says
        self._shown.observe(again.data, 0)

    def samples(self) -> Iterator[Any]:
        """All of ours."""
        for family in self._registry.collect():
            yield from (one for one in family.samples if one.name.startswith(metric_name("")))

    def value(self, name: str, **labels: str) -> float:
        """One sample; 0 where nothing was counted yet."""
        wanted = {**ENGINE_LABELS, **labels}
        found = [one.value for one in self.samples() if one.name == metric_name(name) and one.labels == wanted]
        assert len(found) <= 1
        return found[0] if found else 0.0


def serve(endpoint: Endpoint, engine: Engine, name: str, tokens: list[int]) -> None:
    """A request to its end; vLLM's scheduler takes the statistics in its own steps, so these are handed over, too."""
    connector = engine.scheduler.connector
    taken = connector.get_kv_connector_stats
    heard: list[Any] = []

    def hear() -> Any:
        stats = taken()
        if stats is not None:
            heard.append(stats)
        return stats

    connector.get_kv_connector_stats = hear
    try:
        engine.serve(name, tokens)
        engine.await_stores()
    finally:
        connector.get_kv_connector_stats = taken
    for stats in heard:
        connector.get_kv_connector_stats = lambda stats=stats: stats
        endpoint.take()
    connector.get_kv_connector_stats = taken
    endpoint.take()


def test_everything_is_declared_with_the_labels_that_it_is_counted_with(rig: Rig) -> None:
    # An undeclared name, or another number of labels, ends vLLM's API server by an assert.
    engine = rig.launch(Shape(groups=(mla(),), blocks=64, blocks_per_chunk=2))
    shown = Endpoint(engine)._shown
    declared = shown._offloading_metric_metadata
    names = {metric_name(name) for name in (*COUNTERS, *LABELLED, *HISTOGRAMS)}
    assert names == {name for name in declared if name.startswith(metric_name(""))}
    assert {name: tuple(declared[metric_name(name)].labelnames) for name in LABELLED} == {
        name: (one.label,) for name, one in LABELLED.items()
    }
    assert all(declared[metric_name(name)].buckets == one.buckets for name, one in HISTOGRAMS.items())


def test_a_store_and_a_restore_are_counted_and_measured(rig: Rig) -> None:
    engine = rig.launch(SHAPE)
    endpoint = Endpoint(engine)
    serve(endpoint, engine, "cold", TOKENS)
    stored = endpoint.value("store_objects_total")
    assert stored == endpoint.value("confirmed_objects_total") == rig.gateway.status()["objects"] > 2
    assert endpoint.value("store_bytes_total") == stored * CHUNK_BYTES
    assert endpoint.value("misses_total", reason="absent") >= 1
    assert endpoint.value("store_chunks_sum") == stored
    assert endpoint.value("store_seconds_count") == endpoint.value("store_chunks_count") >= 1
    assert endpoint.value("load_objects_total") == 0
    engine.forget()
    serve(endpoint, engine, "warm", TOKENS)
    loaded = endpoint.value("load_objects_total")
    assert loaded > 0
    assert endpoint.value("load_bytes_total") == loaded * CHUNK_BYTES
    assert endpoint.value("lookup_hits_total") >= loaded
    assert endpoint.value("load_chunks_sum") == loaded
    assert endpoint.value("load_seconds_count") == 1
    assert 0 < endpoint.value("load_seconds_sum") < 60
    assert endpoint.value("lookup_seconds_count") >= 2
    assert endpoint.value("load_job_bytes_sum") >= loaded * CHUNK_BYTES, "in whole slots"
    assert endpoint.value("failures_total", kind="load") == 0


def test_of_several_ranks_all_are_counted(rig: Rig) -> None:
    engine = rig.launch(replace(SHAPE, ranks=2))
    endpoint = Endpoint(engine)
    serve(endpoint, engine, "cold", TOKENS)
    assert endpoint.value("store_objects_total") == rig.gateway.status()["objects"] > 0
    assert endpoint.value("store_objects_total") == 2 * endpoint.value("store_chunks_sum")


def test_failures_and_misses_have_their_kinds(rig: Rig) -> None:
    engine = rig.launch(SHAPE)
    endpoint = Endpoint(engine)
    serve(endpoint, engine, "cold", TOKENS)
    chunk = engine.ranks[0].worker.context
    key = bytes(36)
    engine.manager.lookup(key, SimpleNamespace(req_id="r"))
    endpoint.take()
    absent = endpoint.value("misses_total", reason="absent")
    chunk.count("load_failures", 2)
    chunk.count("refused_objects")
    endpoint.take()
    assert endpoint.value("failures_total", kind="load") == 2
    assert endpoint.value("failures_total", kind="store") == 1
    rig.gateway.kill()
    engine.await_no_gateway()
    engine.manager.lookup(key, SimpleNamespace(req_id="r"))
    endpoint.take()
    assert endpoint.value("misses_total", reason="no_gateway") == 1
    assert endpoint.value("misses_total", reason="absent") == absent
    rig.gateway.start()
    engine.await_gateway()
    chunk.count("load_failures")
    endpoint.take()
    assert endpoint.value("failures_total", kind="load") == 3, "the page is the same after a restart of the gateway"


def test_a_request_waits_where_hits_are_verified_first(rig: Rig) -> None:
    shape = Shape(groups=(full(), full(prefix="other", block_tokens=32)), blocks=96)
    verified = release.channel(shape) == "verified"
    engine = rig.launch(shape)
    endpoint = Endpoint(engine)
    serve(endpoint, engine, "cold", TOKENS)
    engine.forget()
    serve(endpoint, engine, "warm", TOKENS)
    assert endpoint.value("load_objects_total") > 0
    assert (endpoint.value("wait_seconds_count") > 0) is verified
    assert (endpoint.value("lookup_pending_total") > 0) is verified


def test_the_page_lists_all_with_labels_and_texts() -> None:
    rows = re.findall(rf"^\| `{METRIC_PREFIX}(\w+)` \| (.*?) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    wanted = {f"{name}_total": ("", text) for name, (text, _) in COUNTERS.items()}
    wanted |= {f"{name}_total": (f"`{one.label}`: {', '.join(one.of)}", one.text) for name, one in LABELLED.items()}
    wanted |= {name: ("", one.text) for name, one in HISTOGRAMS.items()}
    assert {name: (labels, text) for name, labels, text in rows} == wanted
