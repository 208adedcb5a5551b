"""The metrics endpoint of a running gateway: what it says, to whom, and that it holds nobody up."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from xkv_store import cli, exporter
from xkv_store.errors import UserError
from xkv_store.exporter import Exporter
from xkv_store.geometry import Geometry
from xkv_store.key import ObjectKey
from xkv_store.testing.faults import Fault, FaultPlan, Kind, Operation
from xkv_store.testing.peer import attached
from xkv_store.testing.processes import GatewayProcess, running_gateway
from xkv_store.wire import LoadStatus, StoreStatus

if TYPE_CHECKING:
    from collections.abc import Callable

GEOMETRY = Geometry(65_536)
CONTENT = b"c" * 100_000
LOOPBACK = ("--metrics-port", "0")


def key_of(number: int) -> bytes:
    return ObjectKey(b"e" * 16, 0, number.to_bytes(32, "little"), 0).encode()


def scrape(url: str) -> dict[tuple[str, ...], float]:
    """Values by name and labels' values."""
    with urllib.request.urlopen(url, timeout=20) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        text = answer.read().decode()
    return {
        (sample.name, *(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_what_happens_is_counted(tmp_path: Path) -> None:
    with running_gateway(tmp_path, options=[*LOOPBACK, "--quota", "16MiB"]) as gateway:
        url = gateway.ready["metrics"]
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/metrics", url)
        with attached(Path(gateway.ready["socket"]), geometry=GEOMETRY) as peer:
            assert peer.put(CONTENT, key_of(1)) is StoreStatus.CONFIRMED
            assert peer.put(CONTENT, key_of(1)) is StoreStatus.HELD
            assert peer.get(len(CONTENT), key_of(1)) == (LoadStatus.OK, CONTENT)
            assert peer.get(len(CONTENT), key_of(2))[0] is LoadStatus.MISS
            found = scrape(url)
        expected: dict[tuple[str, ...], float] = {
            ("xkv_store_objects_total", "confirmed"): 1,
            ("xkv_store_objects_total", "held"): 1,
            ("xkv_store_bytes_total",): len(CONTENT),
            ("xkv_load_objects_total", "ok"): 1,
            ("xkv_load_objects_total", "miss"): 1,
            ("xkv_load_bytes_total",): len(CONTENT),
            ("xkv_reads_total", "done"): 1,
            ("xkv_card_objects",): 1,
            ("xkv_card_slots", "used"): 2,
            ("xkv_engines",): 1,
            ("xkv_sessions", "rank"): 1,
            ("xkv_sessions", "scheduler"): 0,
            ("xkv_io_seconds_count", "load"): 1,
            ("xkv_io_seconds_count", "store"): 1,
            ("xkv_namespace_held_bytes", (b"e" * 16).hex()): 2 * GEOMETRY.slot_bytes,
            ("xkv_namespace_quota_bytes", (b"e" * 16).hex()): 16 << 20,
            ("xkv_errors_total",): 0,
        }
        assert {name: found[name] for name in expected} == expected
        assert 0 < found["xkv_io_seconds_sum", "load"] < 20
        gateway.signal(signal.SIGTERM)
        assert gateway.wait() == 0
        with pytest.raises(urllib.error.URLError):
            scrape(url)


def test_only_metrics_are_there(tmp_path: Path) -> None:
    with running_gateway(tmp_path, options=LOOPBACK) as gateway:
        host = gateway.ready["metrics"].split("/")[2]
        for method, path, status in (
            ("GET", "/metrics", 200), ("GET", "/", 200), ("GET", "/metrics?name[]=x", 200), ("GET", "/other", 404),
            ("GET", "/../etc/passwd", 404), ("POST", "/metrics", 404), ("DELETE", "/", 404),
        ):  # fmt: skip
            connection = http.client.HTTPConnection(host, timeout=20)
            connection.request(method, path)
            answer = connection.getresponse()
            assert (answer.status, bool(answer.read())) == (status, True), (method, path)
            connection.close()
        assert gateway.alive


def test_a_client_that_says_nothing_holds_up_no_engine_and_is_let_go(tmp_path: Path) -> None:
    with running_gateway(tmp_path, options=LOOPBACK) as gateway:
        url = gateway.ready["metrics"]
        port = int(url.split(":")[2].split("/")[0])
        silent = [socket.create_connection(("127.0.0.1", port))]
        with attached(Path(gateway.ready["socket"]), geometry=GEOMETRY) as peer:
            begun = time.monotonic()
            assert peer.put(CONTENT, key_of(1)) is StoreStatus.CONFIRMED
            assert time.monotonic() - begun < exporter.REQUEST_S_MAX
        assert scrape(url)["xkv_card_objects",] == 1, "after it was let go"
        for one in silent:
            one.close()
        silent = [socket.create_connection(("127.0.0.1", port))]
        gateway.signal(signal.SIGTERM)
        assert gateway.wait() == 0
        silent[0].close()


def test_a_loop_that_does_not_come_round_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """503, not the numbers of some time ago; and an end does not wait for it."""
    monkeypatch.setattr(exporter, "FIGURES_S_MAX", 0.05)
    one = Exporter("127.0.0.1", 0)
    one.start()
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(one.url, timeout=20)
    assert caught.value.code == 503
    caught.value.close()
    monkeypatch.setattr(exporter, "FIGURES_S_MAX", 60.0)
    codes: list[int] = []

    def ask() -> None:
        connection = http.client.HTTPConnection(one.url.split("/")[2], timeout=20)
        connection.request("GET", "/metrics")
        codes.append(connection.getresponse().status)
        connection.close()

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.2)
    begun = time.monotonic()
    one.close()
    assert time.monotonic() - begun < 5
    asking.join(20)
    assert codes == [503]


def test_a_client_that_says_it_letter_by_letter_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "WHOLE_REQUEST_S_MAX", 0.5)
    one = Exporter("127.0.0.1", 0)
    one.start()
    host, port = one.url.split("/")[2].split(":")
    begun = time.monotonic()
    with socket.create_connection((host, int(port))) as dripping:
        dripping.settimeout(0.05)
        ended = False
        while not ended:
            assert time.monotonic() - begun < exporter.REQUEST_S_MAX, "each letter would give it more time"
            try:
                dripping.send(b"G")
                ended = dripping.recv(1) == b""
            except TimeoutError:
                continue
            except OSError:
                ended = True
    one.close()


def test_where_it_cannot_listen_it_says_what_to_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ["gateway", "run", "--socket-dir", str(tmp_path / "s"), "--card", str(tmp_path / "card")]
        for more, said in (
            (["--metrics-port", str(port)], "--metrics-port"),
            (["--metrics-port", "0", "--metrics-host", "no.such.host.invalid"], "--metrics-host"),
            (["--metrics-host", "127.0.0.1"], "type the port, too"),
            (["--metrics-port", "0", "--metrics-host", ""], "--metrics-host is empty"),
            (["--metrics-port", "0", "--metrics-host", "x" * 300], "--metrics-host"),
        ):
            assert cli.main([*words, *more]) == 2
            errors = capsys.readouterr().err
            assert said in errors
            assert errors.count("\n") == 1
    assert not (tmp_path / "card").exists(), "no card is left behind"


def test_an_address_of_ipv6() -> None:
    try:
        one = Exporter("::1", 0)
    except UserError as error:  # a machine without it
        assert "::1" in str(error)  # noqa: PT017
        return
    assert one.url.startswith("http://[::1]:")
    one.close()


def test_slow_writes_are_seen_in_the_times(tmp_path: Path) -> None:
    slow = Fault(operation=Operation.WRITE, kind=Kind.DELAY, nth=1, times=1_000, delay_s=0.3)
    plan = FaultPlan((slow,))
    with running_gateway(tmp_path, options=LOOPBACK, faults=plan) as gateway:
        with attached(Path(gateway.ready["socket"]), geometry=GEOMETRY) as peer:
            assert peer.put(CONTENT, key_of(1)) is StoreStatus.CONFIRMED
        found = scrape(gateway.ready["metrics"])
        assert (found["xkv_io_seconds_bucket", "store", "0.25"], found["xkv_io_seconds_count", "store"]) == (0, 1)


def test_scrapes_leave_nothing_behind(tmp_path: Path) -> None:
    with running_gateway(tmp_path, options=LOOPBACK) as gateway:
        scrape(gateway.ready["metrics"])
        before = descriptors_of(gateway)
        for _ in range(50):
            scrape(gateway.ready["metrics"])
        deadline = time.monotonic() + 10
        while descriptors_of(gateway) > before and time.monotonic() < deadline:
            time.sleep(0.02)
        assert descriptors_of(gateway) <= before


def descriptors_of(gateway: GatewayProcess) -> int:
    return len(os.listdir(f"/proc/{gateway.pid}/fd"))  # noqa: PTH208


def test_a_gateway_without_the_option_has_none(
    tmp_path: Path, xkv: Callable[..., tuple[int, list[dict[str, Any]]]]
) -> None:
    with running_gateway(tmp_path) as gateway:
        assert gateway.ready["metrics"] is None
        status = xkv("gateway", "status", "--socket", gateway.ready["socket"])[1][0]
        assert json.dumps(status["metrics"]) == "null"
