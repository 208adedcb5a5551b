"""The command line: sizes, exit codes, one-line errors without a traceback, run, status and stop of a real gateway."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

import xkv_store
from xkv_store import cli
from xkv_store.errors import UserError
from xkv_store.sizes import format_size, parse_size_bytes
from xkv_store.testing.processes import running_gateway


class Shell:
    """Runs commands in this process; what a process of its own adds is seen by one test below."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture

    def run(self, *words: str | Path) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        code = cli.main([str(word) for word in words])
        output, errors = self._capture.readouterr()
        return code, output, errors

    def mistake(self, *words: str | Path) -> str:
        """The one line that a user's mistake brings."""
        code, _, errors = self.run(*words)
        assert code == 2, errors
        (line,) = [one for one in errors.splitlines() if one]
        assert line.startswith("xkv: ")
        return line


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("4096", 4096), ("10GiB", 10 << 30), ("1.5 MiB", 3 << 19), ("500MB", 500_000_000), ("7kib", 7168)],
)
def test_sizes(text: str, size_bytes: int) -> None:
    assert parse_size_bytes("--capacity", text) == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "10 gallons", "1e3", "9999999TiB", "nan", "9" * 5_000])
def test_what_is_no_size_says_so(text: str) -> None:
    with pytest.raises(UserError, match="--capacity"):
        parse_size_bytes("--capacity", text)


def test_sizes_for_people() -> None:
    assert [format_size(n) for n in (17, 2048, 10 << 30, 3 << 19)] == ["17 B", "2 KiB", "10 GiB", "1.5 MiB"]


def test_the_version_is_the_package_s(shell: Shell) -> None:
    assert shell.run("--version") == (0, f"xkv {xkv_store.__version__}\n", "")


@pytest.mark.parametrize(
    "words",
    [
        ["gateway", "fly"],
        ["gateway", "run"],
        ["gateway", "run", "--card", "x", "--port", "70000"],
        ["--nonsense"],
        ["gateway", "run", "--card", "x", "--allow-uid", "99999999999999"],
    ],
)
def test_wrong_usage_is_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert cli.main([*words, "--json"]) == 2
    output, errors = capsys.readouterr()
    assert errors == f"xkv: {json.loads(output)['error']}\n", "and a program gets one line of JSON"


def test_help_is_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["gateway", "run", "--help"]) == 0
    assert "--capacity" in capsys.readouterr().out


def test_a_mistake_is_one_line_and_no_traceback(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    words = ["gateway", "status", "--json", "--socket", str(tmp_path / "none.sock")]
    command = [sys.executable, "-m", "xkv_store.cli", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "no gateway answers" in json.loads(done.stdout)["error"]
    assert len(done.stderr.splitlines()) == 1


def test_a_mistake_that_nobody_reads_is_no_traceback(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    command = [sys.executable, "-m", "xkv_store.cli", "ls", str(tmp_path / "none"), "--json"]
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as nobody:  # noqa: PTH123  a descriptor
        done = subprocess.run(
            command, env=environment, stdout=nobody, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("xkv: ")


@pytest.mark.parametrize("words", [["ls", "none", "--json"], ["doctor", "--no-bandwidth"]])
def test_a_full_disk_under_standard_output_is_one_line(tmp_path: Path, words: list[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    command = [sys.executable, "-m", "xkv_store.cli", *words]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
            cwd=tmp_path,
        )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "standard output cannot be written: No space left on device" in done.stderr.splitlines()[-1]


def test_a_card_whose_gateway_has_ended_is_said_with_what_looks_at_it(tmp_path: Path, shell: Shell) -> None:
    """As an engine's own does a minute after the engine: whoever follows the quick start slowly meets it."""
    with running_gateway(tmp_path):
        pass
    place = ("--socket-dir", tmp_path / "sockets", "--card", tmp_path / "card")
    assert f"`xkv ls {tmp_path / 'card'}` look at it all the same" in shell.mistake("gateway", "status", *place)
    assert shell.run("ls", tmp_path / "card")[0] == 0
    assert "there is nothing to stop" in shell.mistake("gateway", "stop", *place)
    assert "there is no card in" in shell.mistake("gateway", "status", *place[:2], "--card", tmp_path / "none")


def test_run_status_stop(tmp_path: Path, shell: Shell) -> None:
    place = ("--socket-dir", tmp_path / "sockets")
    with running_gateway(tmp_path) as gateway:
        assert gateway.ready["pid"] == gateway.pid
        assert Path(gateway.ready["card"]) == tmp_path / "card"
        assert isinstance(gateway.ready["direct"], bool)
        code, output, _ = shell.run("gateway", "status", *place, "--json")
        assert code == 0
        assert json.loads(output)["pid"] == gateway.pid
        assert "capacity_bytes" in shell.run("gateway", "status", *place)[1]
        assert str(gateway.pid) in shell.mistake("gateway", "run", *place, "--card", tmp_path / "second")
        assert not (tmp_path / "second").exists(), "a gateway that cannot have its port leaves no card behind"
        second = ("gateway", "run", "--port", "5558", *place, "--card", tmp_path / "card")
        assert "in use" in shell.mistake(*second)
        code, output, _ = shell.run("gateway", "stop", "--socket", gateway.ready["socket"], "--json")
        assert (code, json.loads(output)) == (0, {"stopped": gateway.pid})
        assert gateway.wait(10) == 0
    assert "no gateway answers" in shell.mistake("gateway", "status", *place)
    assert "no gateway answers" in shell.mistake("gateway", "stop", *place)


def test_a_process_of_many_descriptors_asks_and_stops(tmp_path: Path, shell: Shell) -> None:
    """select() takes no descriptor above 1,023; a program that calls these commands may have more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with running_gateway(tmp_path) as gateway:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4_096, hard), hard))
        fds = [os.open(os.devnull, os.O_RDONLY)]
        try:
            while fds[-1] <= 1_100:
                fds.append(os.dup(fds[0]))
            code = shell.run("gateway", "stop", "--socket", gateway.ready["socket"])[0]
        finally:
            for fd in fds:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert code == 0


def test_bad_values_say_what_to_type(tmp_path: Path, shell: Shell) -> None:
    place = ("gateway", "run", "--socket-dir", tmp_path / "s", "--card", tmp_path / "card")
    assert "10GiB" in shell.mistake(*place, "--capacity", "lots")
    assert not (tmp_path / "card").exists()
    assert "no-such-group" in shell.mistake(*place, "--capacity", "8MiB", "--socket-group", "no-such-group")
    assert "4096" in shell.mistake(*place, "--slot-bytes", "100")
    file = tmp_path / "file"
    file.touch()
    assert str(file) in shell.mistake("gateway", "run", "--socket-dir", tmp_path / "s", "--card", file / "card")


def test_options_that_contradict_each_other(tmp_path: Path, shell: Shell) -> None:
    """One of them would be ignored, and the user looks at another gateway or card than the one named."""
    run = ("gateway", "run", "--socket-dir", tmp_path / "s", "--card", tmp_path / "card", "--capacity", "8MiB")
    assert "exclude each other" in shell.mistake(*run, "--databases", "2", "--database", tmp_path / "x")
    assert not (tmp_path / "card").exists()
    for command in ("status", "stop"):
        line = shell.mistake("gateway", command, "--card", tmp_path, "--port", "5557", "--socket", tmp_path / "y")
        assert "--port and --card and --socket" in line
        assert "--socket-dir" in shell.mistake("gateway", command, "--socket", "x", "--socket-dir", tmp_path)


@pytest.mark.parametrize("option", ["--card", "--database", "--socket-dir"])
def test_paths_that_are_none(tmp_path: Path, shell: Shell, option: str) -> None:
    """An empty one would be the current folder; one that is no text cannot be said in JSON."""
    run = ("gateway", "run", "--socket-dir", tmp_path / "s", "--card", tmp_path / "card", option)
    assert f"{option} is empty" in shell.mistake(*run, "")
    assert r"c\xff" in shell.mistake(*run, os.fsdecode(os.fsencode(tmp_path) + b"/c\xff"))
    assert not list(tmp_path.iterdir())


def test_a_card_of_another_format_version_is_left_alone(tmp_path: Path, shell: Shell) -> None:
    with running_gateway(tmp_path) as gateway:
        assert shell.run("gateway", "stop", "--socket", gateway.ready["socket"])[0] == 0
    database = tmp_path / "card" / "db-0.xkv"
    with database.open("r+b") as file:
        for offset in (0, 4_096):
            block = bytearray(os.pread(file.fileno(), 4_096, offset))
            block[8:10] = (2).to_bytes(2, "little")
            block[4_088:] = xxh3_64_intdigest(block[:4_088]).to_bytes(8, "little")
            os.pwrite(file.fileno(), block, offset)
    before = database.read_bytes()[:8_192]
    line = shell.mistake("gateway", "run", "--socket-dir", tmp_path / "s", "--card", tmp_path / "card")
    assert "version 2" in line
    assert database.read_bytes()[:8_192] == before


def test_somebody_elses_socket_is_left_alone(tmp_path: Path, shell: Shell) -> None:
    folder = tmp_path / "s"
    folder.mkdir(mode=0o700)
    path = folder / "5557.sock"
    run = ("gateway", "run", "--socket-dir", folder, "--card", tmp_path / "card", "--capacity", "8MiB")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as foreign:
        foreign.bind(str(path))
        foreign.listen()
        assert str(path) in shell.mistake(*run)
        assert path.exists()
        assert "no xkv gateway" in shell.mistake("gateway", "status", "--socket-dir", folder)
    path.unlink()
    path.write_text("not a socket")
    assert "move it away" in shell.mistake(*run)


def test_linger_ends_a_gateway_that_nobody_uses(tmp_path: Path) -> None:
    with running_gateway(tmp_path, options=["--linger-s", "0.3"]) as gateway:
        started = time.monotonic()
        assert gateway.wait(10) == 0
        assert time.monotonic() - started < 5


def test_a_path_that_is_none_is_said_in_one_line(shell: Shell, tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    long_path = tmp_path / "/".join(["b" * 200] * 25)
    folders: list[str | Path] = ["--socket-dir", tmp_path / "s", "--card", tmp_path / "card", "--capacity", "8MiB"]
    for path in (loop, long_path, tmp_path / "a\0b"):
        assert shell.mistake("gateway", "status", "--card", path)
        assert shell.mistake("gateway", "status", "--socket", path)
        assert shell.mistake("gateway", "stop", "--socket-dir", path)
        assert shell.mistake("verify", "--socket", path)
        assert shell.mistake("verify", path)
        assert shell.mistake("gateway", "run", *folders, "--database", path)
        assert shell.mistake("gateway", "run", "--card", tmp_path / "card", "--socket-dir", path)
    shell.mistake("gateway", "run", *folders[2:], "--socket-dir", tmp_path / "new", "--socket-group", "a\0b")
    assert not (tmp_path / "new").exists()


def test_a_signal_at_the_moment_of_being_ready_is_a_clean_end(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _SIGNALLED_WHEN_READY, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert not (tmp_path / "s" / "5557.sock").exists()


_SIGNALLED_WHEN_READY = """
import os, signal, sys
from xkv_store import cli, commands_gateway
told = commands_gateway.Output.value
def told_and_signalled(self, value, text):
    told(self, value, text)
    os.kill(os.getpid(), signal.SIGTERM)
commands_gateway.Output.value = told_and_signalled
folder = sys.argv[1]
sys.exit(cli.main(["gateway", "run", "--card", folder + "/card", "--socket-dir", folder + "/s", "--capacity", "8MiB"]))
"""


def test_a_gateway_without_descriptors_says_so_in_one_line(tmp_path: Path) -> None:
    """At each place of its start where it may run out of them."""
    limited = (
        "import os, resource, sys; from xkv_store import cli; os.closerange(3, 64);"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]),) * 2); sys.exit(cli.main(sys.argv[2:]))"
    )
    words = ["gateway", "run", "--card", tmp_path / "card", "--socket-dir", tmp_path / "s", "--capacity", "8MiB"]
    for descriptors in (5, 8, 11, 14, 16):
        command = [sys.executable, "-c", limited, str(descriptors), *map(str, words)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == 2, ended.stderr
        assert "Too many open files" in ended.stderr
        assert "Traceback" not in ended.stderr
