"""The commands are of one style: each is walked, with the core's doctor and with the engine's package's.

If these go, nothing shows any more that whoever knows one command knows the others: help, JSON, exit codes, completion,
and no traceback for a mistake.
"""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import typer.main

from documents.lines import OTHERS
from xkv_store import cli

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

JSON_HELP = "Print JSON, one line for each value."
# Options that mean the same wherever they are, save for where they name a thing to be made.
MADE = {("gateway run", "--card"), ("gateway run", "--port")}


def _walk(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    below = vars(command).get("commands")
    if below is None:
        yield words, command
        return
    for name, one in below.items():
        yield from _walk(one, (*words, name))


def _commands() -> dict[str, tuple[Any, Any]]:
    """Name → the command, and who brings it; the core's doctor has another name here."""
    core = {" ".join(words): one for words, one in _walk(typer.main.get_command(cli.program(others={})), ())}
    both = {" ".join(words): one for words, one in _walk(typer.main.get_command(cli.program(others=OTHERS)), ())}
    found = {name: (one, OTHERS) for name, one in both.items()}
    return found | {f"{name} (the core's)": (core[name], {}) for name in OTHERS if name in core}


COMMANDS = _commands()
EACH = pytest.mark.parametrize("name", COMMANDS)


def _words(name: str) -> list[str]:
    return name.removesuffix(" (the core's)").split()


def _run(capsys: pytest.CaptureFixture[str], name: str, *words: str) -> tuple[int, str, str]:
    code = cli.main([*_words(name), *words], COMMANDS[name][1])
    output, errors = capsys.readouterr()
    assert "Traceback" not in output + errors
    return code, output, errors


def test_the_commands_are_those_that_the_program_promises() -> None:
    promised = {
        "gateway run",
        "gateway status",
        "gateway stop",
        "ls",
        "namespaces",
        "purge",
        "verify",
        "bench",
        "doctor",
        "why",
    }
    assert promised <= set(COMMANDS)


@EACH
def test_help_says_what_the_command_and_each_of_its_options_do(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, output, errors = _run(capsys, name, "--help")
    assert (code, errors) == (0, "")
    assert output.startswith("Usage: xkv ")
    command, _ = COMMANDS[name]
    first = (command.help or "").split("\n\n")[0]
    assert re.match(r"[A-Z].*", first), "a sentence"
    for parameter in command.params:
        text = parameter.help or ""
        assert text.endswith((".", "]")), f"{parameter.name}: {text!r}"
        assert text[0].isupper() or text.startswith("vLLM"), f"{parameter.name}: {text!r}"


@EACH
def test_each_has_json_by_the_same_word(name: str) -> None:
    command, _ = COMMANDS[name]
    (option,) = [one for one in command.params if "--json" in one.opts]
    assert option.help == JSON_HELP
    assert option.is_flag


def test_options_of_one_name_are_one_thing() -> None:
    """`why` asks about one thing, by all its digits; lists select by how those begin."""
    meant: dict[str, dict[str, list[str]]] = {}
    for name, (command, _) in COMMANDS.items():
        for parameter in command.params:
            for option in parameter.opts:
                if option.startswith("--") and (name, option) not in MADE and "why" not in _words(name):
                    meant.setdefault(option, {}).setdefault(parameter.help, []).append(name)
    assert {option: said for option, said in meant.items() if len(said) > 1} == {}


@EACH
def test_an_unknown_option_is_code_2_and_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, output, errors = _run(capsys, name, "--nonsense")
    assert (code, output) == (2, "")
    assert "--nonsense" in errors
    code, output, errors = _run(capsys, name, "--nonsense", "--json")
    assert code == 2
    (line,) = output.splitlines()
    assert errors == f"xkv: {json.loads(line)['error']}\n"


@EACH
@pytest.mark.parametrize("place", ["none", "file", "link", "\0"], ids=["nothing", "a file", "a loop", "no path"])
def test_a_place_that_is_none_is_one_line(
    name: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For a person and for a program alike; nothing is made, and doctor says what it found."""
    if name.startswith("doctor") and place == "none":
        return  # a card that is not there can be made: nothing is wrong
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "link")
    before = sorted(tmp_path.iterdir())
    where = f"{tmp_path}/{place}"
    command, _ = COMMANDS[name]
    options = {option for parameter in command.params for option in parameter.opts}
    has_card = any("--card" in parameter.opts for parameter in command.params)
    words = ["--card", where] if has_card else [where]
    if name == "gateway run":
        words += ["--socket-dir", f"{tmp_path}/file/below"]
    words += ["--no-bandwidth"] * ("--no-bandwidth" in options) + ["--all", "--yes"] * ("--yes" in options)
    code, output, errors = _run(capsys, name, *words)
    assert code in {1, 2}
    assert len((errors or output).splitlines()) == 1 or name.startswith("doctor")
    code_again, output, errors = _run(capsys, name, *words, "--json")
    assert code_again == code
    (line,) = output.splitlines()
    value = json.loads(line)
    assert value.get("verdict") == "fault" or errors == f"xkv: {value['error']}\n"
    assert sorted(tmp_path.iterdir()) == before


@EACH
@pytest.mark.parametrize("more", [[], ["--rebuild"], ["--drop"]], ids=" ".join)
def test_a_folder_without_a_card_is_left_as_it_is(
    name: str, more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that was mistyped is somebody's: nothing of ours is left behind in it."""
    command, _ = COMMANDS[name]
    options = {option for parameter in command.params for option in parameter.opts}
    if name == "gateway run" or not options.issuperset(more):
        return
    folder = tmp_path / "folder"
    folder.mkdir()
    words = ["--card", str(folder)] if "--card" in options else [str(folder)]
    words += ["--no-bandwidth"] * ("--no-bandwidth" in options) + ["--all", "--yes"] * ("--yes" in options)
    words += ["--size", "16MiB", "--trips", "1"] * (name == "bench")
    words += ["--socket-dir", str(tmp_path / "sockets")] * ("--socket-dir" in options and more != ["--rebuild"])
    if name.startswith("why"):
        words += ["--key", "00" * 27]
    code, output, errors = _run(capsys, name, *words, *more)
    if name != "bench" and not name.startswith("doctor"):
        assert code == 2, output
        assert f"there is no card in {folder}" in errors
    assert list(folder.iterdir()) == []
    assert [one.name for one in tmp_path.iterdir()] == ["folder"]


KEY, CONFIG = "00" * 27, '{"kv_connector_extra_config": {"xkv.port": 5557, "xkv.socket_dir": "/none"}}'
UNUSED = {
    "why": [
        (["--key", KEY, "--group", "1", "--ranks", "2"], "--group and --ranks: a --key says its group and its rank"),
        (["--namespace", "3f", "--other", "40", "--generation", "3"], "--generation: two namespaces are compared"),
        (["--namespace", "3f", "--other", "40", "--group", "0"], "--group: two namespaces are compared"),
        (
            ["--namespace", "3f", "--block-hash", "00", "--ranks", "2", "--generation", "3"],
            "each rank's object has one",
        ),
        (["--key", KEY, "--hash-seed", "0", "--pid", "1", "--salt", "a"], "--hash-seed, --pid and --salt: without"),
        (["--tp", "2", "--salt", "a"], "--salt: without --tokens no hash is made"),
        (["--tp", "2", "--ranks", "2"], "--ranks: an object or a chunk is not what is asked about"),
        (["--tokens", "x", "--generation", "2"], "--generation: an object or a chunk is not what"),
        (["--tokens", "x", "--hash-seed", "0", "--pid", "1"], "--pid: --hash-seed says"),
        (["--config", CONFIG, "--socket-dir", "/other"], "--socket-dir: --config has xkv.socket_dir"),
    ],
    "doctor": [
        (["--config", CONFIG, "--blocks-per-chunk", "4"], "--blocks-per-chunk: --config says the chunk"),
        (["--dtype", "fp8", "--prefill-tokens-per-s", "9"], "--dtype and --prefill-tokens-per-s: without --model"),
        (["--blocks-per-chunk", "4"], "--blocks-per-chunk: without --model"),
        (["--tp", "2", "--block-size", "32"], "--tp and --block-size: neither --model nor --config"),
    ],
    "verify": [(["none", "--rebuild", "--socket-dir", "/other"], "--rebuild is for a card that no gateway has")],
    "ls": [(["none", "--namespace", "3f", "--key", "3f"], "type one of them")],
    "purge": [(["none", "--all", "--before", "3", "--yes"], "exclude each other")],
    "gateway run": [
        (["--card", "none", "--metrics-host", "0.0.0.0"], "type the port, too"),
        (["--card", "none", "--databases", "2", "--database", "x"], "exclude each other"),
    ],
    "gateway status": [(["--socket", "x", "--socket-dir", "/other"], "leave --socket-dir out")],
}


@pytest.mark.parametrize(("name", "words", "said"), [(name, *row) for name, rows in UNUSED.items() for row in rows])
def test_an_option_that_means_nothing_for_what_is_asked_is_refused(
    name: str, words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever typed it would believe that it was taken into account."""
    words = [str(tmp_path / "none") if word == "none" else word for word in words]
    if name == "why":
        words = [str(tmp_path / "none"), *words] if "--config" not in words else words
        (tmp_path / "tokens").write_text("1 2 3")
        words = [str(tmp_path / "tokens") if word == "x" else word for word in words]
    code, output, errors = _run(capsys, name, *words)
    assert (code, output) == (2, "")
    assert errors.count("\n") == 1
    assert said in errors
    assert not (tmp_path / "none").exists()


# --- completion -----------------------------------------------------------------------------------------------------


def _completed(*words: str) -> list[str]:
    environment = {
        **os.environ,
        "_XKV_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
    }
    program = "import sys; sys.argv = ['xkv']; from xkv_store.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_a_shell_completes_commands_and_options() -> None:
    assert {"bench", "doctor", "gateway", "ls", "namespaces", "purge", "verify"} <= set(_completed("xkv", ""))
    assert _completed("xkv", "gateway", "st") == ["status", "stop"]
    assert "--namespace" in _completed("xkv", "ls", "--na")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_its_script(
    shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_XKV_COMPLETE", f"source_{shell}")
    assert cli.main([]) == 0
    output, errors = capsys.readouterr()
    assert f"_XKV_COMPLETE=complete_{shell}" in output
    assert errors == ""


# --- long work ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_json", [False, True])
def test_long_work_shows_how_far_it_is_on_a_terminal_and_nowhere_else(tmp_path: Path, as_json: bool) -> None:
    words = ["bench", str(tmp_path), "--size", "16MiB", "--trips", "2", *(["--json"] if as_json else [])]
    terminal, side = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry), "TERM": "xterm"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "xkv_store.cli", *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=side,
            text=True,
            timeout=120,
            check=False,
        )
        os.write(side, b"end")
        shown = os.read(terminal, 1 << 16).decode()
    finally:
        os.close(side)
        os.close(terminal)
    assert done.returncode == 0, shown
    assert ("writing and reading" in shown) is not as_json
    assert ("round trips" in shown) is not as_json
    assert len(done.stdout.splitlines()) == (1 if as_json else 2)


def test_what_bench_measures_is_told_and_nothing_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, output, _ = _run(
        capsys, "bench", str(tmp_path), "--size", "16MiB", "--seconds", "1", "--trips", "3", "--json"
    )
    assert code == 0
    found = json.loads(output)["bench"]
    assert found["folder"] == str(tmp_path)
    assert found["bandwidth"]["read_bytes_per_s"] > 0
    assert found["bandwidth"]["write_bytes_per_s"] > 0
    assert 0 < found["bandwidth"]["moved_bytes"] <= 16 << 20
    trip = found["round_trip"]
    assert trip["trips"] == 3
    assert 0 < trip["get_s"]["median"] <= trip["get_s"]["max"] < 10
    assert 0 < trip["put_s"]["median"] <= trip["put_s"]["max"] < 10
    assert list(tmp_path.iterdir()) == []
    code, output, _ = _run(capsys, "bench", str(tmp_path), "--size", "16MiB", "--trips", "0", "--json")
    assert "round_trip" not in json.loads(output)["bench"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--size", "1KiB"], "measure with more"),
        (["--size", "lots"], "--size 'lots' is not a size"),
        (["--slot-bytes", "100"], "4096"),
    ],
)
def test_what_bench_cannot_do_it_says(
    tmp_path: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, errors = _run(capsys, "bench", str(tmp_path), *words)
    assert code == 2
    assert said in errors
    assert list(tmp_path.iterdir()) == []
