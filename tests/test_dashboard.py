"""Dashboard and alert rules: every query names what a running gateway exports, and every alert says what to do.

Owns: reading both files by the grammar of Prometheus, and what of a query must be there.
Must not know: how a gateway comes by its figures.
"""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from documents.lines import ROOT
from xkv_store.geometry import Geometry
from xkv_store.key import ObjectKey
from xkv_store.testing.peer import attached
from xkv_store.testing.processes import running_gateway
from xkv_store.wire import StoreStatus

if TYPE_CHECKING:
    from collections.abc import Iterator

DASHBOARD = ROOT / "deploy" / "grafana-xkv.json"
ALERTS = ROOT / "deploy" / "alerts.yml"
PAGE = ROOT / "docs" / "metrics.md"
OF_PROMETHEUS = {"up"}  # its own, of every scrape
ITS_LABELS = {"instance", "job"}
OF_COUNTERS = {"rate", "increase", "irate"}
COUNTS = re.compile(r"_(total|bucket|sum|count)$")
GRAFANAS = {"$__rate_interval": "1m", "$instance": ".*"}  # what it puts in the place of its variables
GRID_COLUMNS = 24
UNITS = {"short", "ops", "Bps", "bytes", "s", "percentunit"}  # ids that Grafana knows

Exported = dict[str, list[dict[str, str]]]  # the labels of each sample, by its name


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """What a gateway exports that has one object, and a quota."""
    folder = tmp_path_factory.mktemp("exported")
    found: Exported = {}
    options = ["--metrics-port", "0", "--quota", "16MiB"]
    with running_gateway(folder, options=options) as gateway:
        with attached(Path(gateway.ready["socket"]), geometry=Geometry(65_536)) as peer:
            assert peer.put(b"x" * 9_000, ObjectKey(b"d" * 16, 0, b"h", 0).encode()) is StoreStatus.CONFIRMED
        with urllib.request.urlopen(gateway.ready["metrics"], timeout=20) as answer:
            text = answer.read().decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def queries() -> Iterator[tuple[str, str]]:
    """(where it stands, query) of both."""
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            yield f"panel {panel['title']}", target["expr"]
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            yield f"variable {variable['name']}", variable["query"]["query"]
    for rule in rules():
        yield f"alert {rule['alert']}", rule["expr"]


def parsed(query: str) -> promql_parser.Expr:
    """As Prometheus reads it, when Grafana has put its variables in. Raises ValueError."""
    variable = re.fullmatch(r"label_values\((.+), \w+\)", query)  # Grafana's own, of a selector
    text = variable[1] if variable else query
    for name, value in GRAFANAS.items():
        text = text.replace(name, value)
    expression: promql_parser.Expr = promql_parser.parse(text)
    return expression


def nodes(expression: promql_parser.Expr) -> list[Any]:
    found: list[Any] = []
    promql_parser.walk(expression, found.append)
    return found


def selected(expression: promql_parser.Expr) -> list[promql_parser.VectorSelector]:
    parts = [one.vector_selector if isinstance(one, promql_parser.MatrixSelector) else one for one in nodes(expression)]
    return [one for one in parts if isinstance(one, promql_parser.VectorSelector)]


def objections(query: str, exported: Exported) -> list[str]:
    """What a query names that is not there, or asks for what it cannot be."""
    try:
        expression = parsed(query)
    except ValueError as error:
        return [str(error)]
    wrong = []
    for one in selected(expression):
        name = one.name or ""
        if name in OF_PROMETHEUS:
            continue
        if name not in exported:
            wrong.append(f"no metric {name}")
            continue
        for matcher in one.matchers.matchers:
            there = {labels.get(matcher.name, "") for labels in exported[name]}
            is_pattern = matcher.op in (promql_parser.MatchOp.Re, promql_parser.MatchOp.NotRe)
            pattern = matcher.value if is_pattern else re.escape(matcher.value)
            if matcher.name not in ITS_LABELS and not any(re.fullmatch(pattern, value) for value in there - {""}):
                wrong.append(f"no {matcher.name} {matcher.value} of {name}")
    for one in nodes(expression):
        if isinstance(one, promql_parser.Call) and one.func.name in OF_COUNTERS:
            names = [selector.name or "" for argument in one.args for selector in selected(argument)]
            wrong += [f"{one.func.name} of {name}, which does not count" for name in names if not COUNTS.search(name)]
        if isinstance(one, promql_parser.AggregateExpr | promql_parser.BinaryExpr):
            labels = {label for name in selected(one) for each in exported.get(name.name or "", ()) for label in each}
            wrong += [f"no label {label}" for label in grouped_by(one) if label not in labels | ITS_LABELS]
    return wrong


def grouped_by(one: promql_parser.AggregateExpr | promql_parser.BinaryExpr) -> list[str]:
    if isinstance(one, promql_parser.AggregateExpr):
        return [] if one.modifier is None else one.modifier.labels
    matching = None if one.modifier is None else one.modifier.matching
    return [] if matching is None else matching.labels


@pytest.mark.parametrize(("where", "query"), list(queries()), ids=lambda value: value[:60])
def test_every_query_names_only_what_a_gateway_exports(where: str, query: str, exported: Exported) -> None:
    assert re.search(r"\bxkv_|\bup\b", query)
    assert objections(query, exported) == [], where


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("sum(rate(xkv_load_objets_total[5m]))", "no metric xkv_load_objets_total"),
        ('xkv_load_objects_total{result="hit"}', "no result hit of xkv_load_objects_total"),
        ('xkv_card_objects{state="free"}', "no state free of xkv_card_objects"),
        ("sum by (reason) (xkv_load_objects_total)", "no label reason"),
        ('xkv_load_objects_total{result=~"hit.*"}', "no result hit.* of xkv_load_objects_total"),
        ("xkv_engines / on (job, reason) xkv_engines", "no label reason"),
        ("summ(xkv_engines)", "unknown function with name 'summ'"),
        ("sum(xkv_engines", "unclosed left parenthesis"),
        (
            "rate(xkv_load_objects_total)",
            "expected type matrix in call to function 'rate', got vector",
        ),
        ("rate(xkv_engines[5m])", "rate of xkv_engines, which does not count"),
    ],
)
def test_a_query_that_names_something_else_is_found(query: str, said: str, exported: Exported) -> None:
    assert said in objections(query, exported)


def test_what_is_exported_is_looked_at_or_left_to_whoever_looks_closer(exported: Exported) -> None:
    """A figure that no panel shows is one that nobody sees when it matters."""
    shown = {name for _, query in queries() for name in re.findall(r"\bxkv_[a-z_]+", query)}
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported}
    unseen = {name for name in families if name not in shown and f"{name}_bucket" not in shown}
    assert unseen == {
        "xkv_card_capacity_bytes", "xkv_card_slot_bytes", "xkv_card_object_bytes", "xkv_card_limbo_objects",
        "xkv_lookup_table_entries", "xkv_index_map_bytes", "xkv_draining", "xkv_namespaces", "xkv_namespace_objects",
        "xkv_namespace_limbo_bytes", "xkv_load_objects_from_limbo_total", "xkv_evicted_chunks_total",
        "xkv_stores_withdrawn_total", "xkv_connections_total", "xkv_verify_runs_total", "xkv_verified_objects_total",
        "xkv_verified_damaged_objects_total", "xkv_purges_total",
    }  # fmt: skip


# --- the dashboard ----------------------------------------------------------------------------------------


def test_the_dashboard_is_what_grafana_imports() -> None:
    found = dashboard()
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time", "version"} <= set(found)
    assert found["schemaVersion"] >= 36, "older ones are migrated, and name data sources otherwise"
    assert "id" not in found, "an id is of one Grafana"
    assert len(found["uid"]) <= 40
    panels = found["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 10
    for panel in panels:
        assert panel["type"] in ("stat", "timeseries")
        assert panel["title"]
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        targets = panel["targets"]
        assert len({target["refId"] for target in targets}) == len(targets) >= 1
        legends = [target["legendFormat"] for target in targets]
        assert len(set(legends)) == len(legends), "who could tell them apart"


def test_panels_lie_side_by_side() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < GRID_COLUMNS
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_panel_asks_the_data_source_and_the_gateways_that_are_chosen() -> None:
    names = [variable["name"] for variable in dashboard()["templating"]["list"]]
    assert names == ["datasource", "instance"]
    text = DASHBOARD.read_text()
    assert set(re.findall(r"\$\{?(\w+)", text)) == {"datasource", "instance", "__rate_interval", "__all"}
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            assert target["datasource"] == panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            metrics = re.findall(r"\bxkv_[a-z_]+", target["expr"])
            assert target["expr"].count('instance=~"$instance"') == len(metrics), panel["title"]


# --- alerts -----------------------------------------------------------------------------------------------


def test_every_alert_says_what_it_means_and_what_to_do_as_the_page_does() -> None:
    rows = {}
    for line in PAGE.read_text().splitlines():
        if line.startswith("| `Xkv"):
            name, when, what = (cell.strip() for cell in line.strip("|").split(" | "))
            rows[name.strip("| `")] = (when, what.rstrip(" |"))
    told = {rule["alert"]: (rule["annotations"]["summary"], rule["annotations"]["runbook"]) for rule in rules()}
    assert len(told) == len(rules()) > 10
    assert rows == told


def test_alerts_are_what_prometheus_loads() -> None:
    for rule in rules():
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"\d+[smh]", rule["for"])
        assert rule["labels"] == {"severity": rule["labels"]["severity"]}
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert re.search(r"[<>=]=? ?[\d.]+$", rule["expr"]), "an alert is a comparison"


def test_options_that_remedies_name_are_there() -> None:
    """Whoever is woken up types what stands there."""
    from documents.lines import check_xkv  # noqa: PLC0415

    for rule in rules():
        remedy = rule["annotations"]["runbook"]
        for option in re.findall(r"`(--[a-z-]+)`", remedy):
            check_xkv(["gateway", "run", "--card", "x", option, "1"])
        for command in re.findall(r"`xkv ([^`]+)`", remedy):
            check_xkv([*command.split(), "card"])
