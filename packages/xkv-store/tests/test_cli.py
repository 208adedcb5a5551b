"""The command line: sizes, exit codes, one-line errors without a traceback, run, status and stop of a real gateway."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from xkv_store import cli
from xkv_store.errors import UserError
from xkv_store.sizes import format_size, parse_size_bytes
from xkv_store.testing.processes import running_gateway


def run_cli(*words: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    command = [sys.executable, "-m", "xkv_store.cli", *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def mistake(*words: str | Path) -> str:
    """The one line that a user's mistake brings."""
    done = run_cli(*words)
    assert done.returncode == 1, done
    assert "Traceback" not in done.stderr
    (line,) = [one for one in done.stderr.splitlines() if one]
    assert line.startswith("xkv: ")
    return line


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("4096", 4096), ("10GiB", 10 << 30), ("1.5 MiB", 3 << 19), ("500MB", 500_000_000), ("7kib", 7168)],
)
def test_sizes(text: str, size_bytes: int) -> None:
    assert parse_size_bytes("--capacity", text) == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "10 gallons", "1e3", "9999999TiB", "nan"])
def test_what_is_no_size_says_so(text: str) -> None:
    with pytest.raises(UserError, match="--capacity"):
        parse_size_bytes("--capacity", text)


def test_sizes_for_people() -> None:
    assert [format_size(n) for n in (17, 2048, 10 << 30, 3 << 19)] == ["17 B", "2 KiB", "10 GiB", "1.5 MiB"]


@pytest.mark.parametrize(
    "words",
    [["gateway", "fly"], ["gateway", "run"], ["gateway", "run", "--card", "x", "--port", "70000"], ["--nonsense"]],
)
def test_wrong_usage_is_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_help_is_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["gateway", "run", "--help"]) == 0
    assert "--capacity" in capsys.readouterr().out


def test_run_status_stop(tmp_path: Path) -> None:
    with running_gateway(tmp_path) as gateway:
        assert gateway.ready["pid"] == gateway.pid
        assert Path(gateway.ready["card"]) == tmp_path / "card"
        assert isinstance(gateway.ready["direct"], bool)
        place = ("--socket-dir", tmp_path / "sockets")
        status = run_cli("gateway", "status", *place, "--json")
        assert status.returncode == 0, status
        assert json.loads(status.stdout)["pid"] == gateway.pid
        readable = run_cli("gateway", "status", *place)
        assert "capacity_bytes" in readable.stdout
        assert str(gateway.pid) in mistake("gateway", "run", *place, "--card", tmp_path / "second")
        assert not (tmp_path / "second").exists(), "a gateway that cannot have its port leaves no card behind"
        other_port = ("--port", "5558", *place)
        assert "in use" in mistake("gateway", "run", *other_port, "--card", tmp_path / "card")
        stopped = run_cli("gateway", "stop", "--socket", gateway.ready["socket"], "--json")
        assert json.loads(stopped.stdout) == {"stopped": gateway.pid}
        assert gateway.process.wait(10) == 0
    assert "no gateway answers" in mistake("gateway", "status", *place)
    assert "no gateway answers" in mistake("gateway", "stop", *place)


def test_an_error_is_json_too_where_json_is_asked_for(tmp_path: Path) -> None:
    done = run_cli("gateway", "status", "--socket", tmp_path / "none.sock", "--json")
    assert done.returncode == 1
    assert "no gateway answers" in json.loads(done.stdout)["error"]


def test_bad_values_say_what_to_type(tmp_path: Path) -> None:
    place = ("--socket-dir", tmp_path / "s", "--card", tmp_path / "card")
    assert "10GiB" in mistake("gateway", "run", *place, "--capacity", "lots")
    assert not (tmp_path / "card").exists()
    file = tmp_path / "file"
    file.touch()
    assert str(file) in mistake("gateway", "run", "--socket-dir", tmp_path / "s", "--card", file / "card")
    assert "group" in mistake("gateway", "run", *place, "--socket-group", "no-such-group", "--capacity", "8MiB")


def test_somebody_elses_socket_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    folder.mkdir(mode=0o700)
    path = folder / "5557.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as foreign:
        foreign.bind(str(path))
        foreign.listen()
        line = mistake("gateway", "run", "--socket-dir", folder, "--card", tmp_path / "card", "--capacity", "8MiB")
        assert str(path) in line
        assert path.exists()
        assert "no xkv gateway" in mistake("gateway", "status", "--socket-dir", folder)
    path.unlink()
    path.write_text("not a socket")
    line = mistake("gateway", "run", "--socket-dir", folder, "--card", tmp_path / "card", "--capacity", "8MiB")
    assert "move it away" in line


def test_linger_ends_a_gateway_that_nobody_uses(tmp_path: Path) -> None:
    with running_gateway(tmp_path, options=["--linger-s", "0.3"]) as gateway:
        started = time.monotonic()
        assert gateway.process.wait(10) == 0
        assert time.monotonic() - started < 5
