"""What the pages tell people to type: each line is run here, or it is written down who runs it.

Owns: which commands are run and with what in the place of a page's paths, and which are left to whom.
Must not know: what the commands do; that is their own tests' matter.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer.main

from development.pages import prose
from documents.lines import OTHERS, ROOT, Line, blocks, check_transfer_config, check_xkv, commands, pages, split
from xkv_offload.config_table import KEYS
from xkv_offload.metrics import COUNTERS, HISTOGRAMS, LABELLED, METRIC_PREFIX
from xkv_store import cli, sockets, wire
from xkv_store.geometry import Geometry
from xkv_store.testing.peer import Peer

if TYPE_CHECKING:
    from collections.abc import Iterator

# Who runs what is not run here: a session of noxfile.py, or a test. The key is how the command begins.
LEFT_TO = {
    ("python3", "dev.py"): "noxfile.py",  # each is a session, and that it is one is asked below
    ("pip", "install"): "package",
    ("/opt/xkv/bin/pip", "install"): "package",
    ("python3", "-m", "venv"): "package",
    ("export", "PYTHONHASHSEED=0"): "stack",
    ("curl",): "stack",  # the same server's
    ("vllm", "serve"): "stack",  # its flag's value is read below
    ("python", "-m", "xkv_compat", "report"): "compat/tests/test_report.py",
    ("python", "-m", "xkv_store.testing.faulty_gateway"): "packages/xkv-store/tests/test_gateway_medium.py",
    # They need a machine of their own; that files and options fit together is asked there.
    ("install", "-m"): "tests/test_deploy.py",
    ("systemctl",): "tests/test_deploy.py",
    ("useradd",): "tests/test_deploy.py",
    ("ln", "-s"): "tests/test_deploy.py",
    ("podman",): "tests/test_deploy.py",
}
# What stands in for a page's examples, in the folder of a test.
SMALL = {"500GiB": "64MiB", "100GiB": "32MiB", "3fa9=20GiB": "3fa9=8MiB"}
ENGINE = """{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
    "spec_name": "XkvOffloadingSpec", "spec_module_path": "xkv_offload", "blocks_per_chunk": 16, "xkv.port": 5557}}"""
IDENTITY: dict[str, Any] = {
    "format": 1,
    "facts": {
        "model": {"model": "org/small", "hash_algorithm": "sha256", "cache_dtype": "auto"},
        "groups": [{"id": 0, "tokens_per_block": 16, "layers": [[2, ["FullAttentionSpec", 512]]]}],
        "blocks_per_chunk": 16,
        "tokens_per_hash": 16,
        "replicated": False,
        "sizes": [1, 1, 1, 1],
    },
    "weights": "sampled:aa",
    "salt": "",
    "launch": "",
}
MODEL = '{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}'
PLACES = ("/nvme", "/run/xkv", "~")
READY = re.compile(rb"xkv gateway ready|serving")  # the second is what an embedded one logs
START_S_MAX = 30.0
# There must be a gateway for these.
SERVES = ("status", "stop", "verify", "namespaces", "ls", "purge", "doctor", "bench", "why")

OURS = [line for line in commands() if line.program[0] == "xkv"]


def _sessions() -> set[str]:
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {one.name for one in functions if any("session" in ast.unparse(how) for how in one.decorator_list)}


def _left_to(line: Line) -> str | None:
    return next((who for start, who in LEFT_TO.items() if line.program[: len(start)] == start), None)


# --- every line is known ----------------------------------------------------------------------------------


def test_every_command_of_every_page_is_run_by_somebody() -> None:
    unknown = [f"{line.page}: {line.text}" for line in commands() if line not in OURS and _left_to(line) is None]
    assert unknown == []


def test_nothing_is_written_down_that_no_page_says_or_nobody_runs() -> None:
    lines = [line.program for line in commands()]
    assert [start for start in LEFT_TO if not any(line[: len(start)] == start for line in lines)] == []
    there = {who for who in LEFT_TO.values() if who in _sessions() or (ROOT / who).is_file()}
    assert there == set(LEFT_TO.values())


def test_every_session_that_a_page_names_is_one() -> None:
    named = {
        (str(path.relative_to(ROOT)), name)
        for path in pages()
        for words in re.findall(r"(?:dev\.py|nox) -s ((?:\"?[\w.()]+\"? ?)+)", path.read_text())
        for name in re.findall(r"[a-z_]+(?=[\s\"(]|$)", words)
        if name != "RELEASE"
    }
    assert len(named) > 20, "the pattern finds them"
    assert {(page, name) for page, name in named if name not in _sessions()} == set()


def test_every_configuration_of_an_engine_is_one_that_it_would_take() -> None:
    lines = [line for line in commands() if line.program[:2] == ("vllm", "serve")]
    assert lines
    for line in lines:
        flag = line.words.index("--kv-transfer-config")
        check_transfer_config(line.words[flag + 1])


def _named(pattern: str) -> dict[str, str]:
    """What pages name, by the first page that does."""
    found: dict[str, str] = {}
    for path in pages():
        for name in re.findall(pattern, path.read_text()):
            found.setdefault(name, path.name)
    return found


def test_keys_and_metrics_that_pages_name_are_there() -> None:
    """Whoever copies a name from a page gets an error, or a query without an answer, where it has gone."""
    keys = _named(r"[`\"](xkv\.[a-z_]+)[`\"]")
    metrics = _named(rf"{METRIC_PREFIX}([a-z_]+)")
    assert len(keys) > 20
    assert len(metrics) > 4
    own = {key.name for key in KEYS}
    assert {name: page for name, page in keys.items() if name not in own} == {}
    known = {*COUNTERS, *LABELLED, *HISTOGRAMS}
    assert {name: page for name, page in metrics.items() if name.removesuffix("_total") not in known} == {}


@pytest.mark.parametrize("line", OURS, ids=lambda line: f"{line.page}: {line.text}")
def test_every_option_is_one_of_the_command_line(line: Line) -> None:
    check_xkv(line.program[1:])


@pytest.mark.parametrize("words", [["gateway", "fly"], ["gateway", "status", "--prot", "1"], ["bench"]])
def test_an_option_that_is_none_is_found(words: list[str]) -> None:
    with pytest.raises(Exception, match=r"(?i)fly|prot|folder"):
        check_xkv(words)


def _mentioned() -> list[tuple[str, str]]:
    """What pages say of `xkv` in the middle of a sentence; `run|status` are two."""
    found = []
    for path in pages():
        spans = [part.strip("` \n") for is_text, part in prose(path.read_text()) if not is_text]
        for span in spans:
            if span.startswith("xkv ") and "\n" not in span and "…" not in span:
                first, *others = span.split("|")
                stem = first.rsplit(" ", 1)[0]
                found += [(path.name, first), *((path.name, f"{stem} {other}") for other in others)]
    return found


def _objection(text: str) -> str:
    """What the command line says against a sentence's words; what a sentence leaves out is nothing against it."""
    try:
        check_xkv(shlex.split(text)[1:])
    except Exception as error:  # noqa: BLE001  typer brings click's errors under names of its own
        return "" if type(error).__name__ in ("MissingParameter", "NoArgsIsHelpError") else str(error)
    return ""


def test_what_a_sentence_says_of_a_command_is_so() -> None:
    mentioned = _mentioned()
    assert len(mentioned) > 5, "they are found"
    assert [(page, text, _objection(text)) for page, text in mentioned if _objection(text)] == []
    assert _objection("xkv gateway fly")
    assert _objection("xkv gateway run --no-such")


def test_every_command_takes_json() -> None:
    """As the page on operations says."""
    leaves, left = [], [("xkv", typer.main.get_command(cli.program((), OTHERS)))]
    while left:
        name, command = left.pop()
        if isinstance(command, typer.core.TyperGroup):
            left += [(f"{name} {own}", inner) for own, inner in command.commands.items()]
        else:
            leaves.append((name, {option for one in command.params for option in one.opts}))
    assert len(leaves) > 3
    assert [name for name, options in leaves if "--json" not in options] == []


def test_a_command_of_several_lines_is_one() -> None:
    text = "a 'b\n c'   # why\n# nothing\nd \\\n  e\n"
    assert [line.words for line in split("page", text)] == [("a", "b\n c"), ("d", "e")]
    assert blocks("1. x\n\n   ```\n   a\n   ```\n\n```text\nb\n```\n", "") == ["a\n"]


# --- and runs ---------------------------------------------------------------------------------------------


class World:
    """A folder that has all the places that pages name, and the gateways that are started in it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        for name in ("nvme/a", "nvme/b", "run", "home"):
            (folder / name).mkdir(parents=True)
        (folder / "run").chmod(0o700)
        (folder / "home" / "engine.json").write_text(ENGINE)
        (folder / "home" / "model").mkdir()
        (folder / "home" / "model" / "config.json").write_text(MODEL)
        (folder / "home" / "tokens").write_text(" ".join(map(str, range(100, 400))))
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder / "run"))

    def words(self, line: Line) -> list[str]:
        """A page's words, with places of this folder and a small card."""
        return [self._here(SMALL.get(word, word)) for word in line.program[1:]]

    def _here(self, word: str) -> str:
        for place in PLACES:
            if word.startswith(place):
                home = self.folder / "home" if place == "~" else self.folder / place.lstrip("/")
                return str(home) + word.removeprefix(place)
        return word

    @contextmanager
    def serving(self, words: list[str], module: str) -> Iterator[None]:
        """A gateway's process until the end of the block, which must end it, or let it end, well."""
        log = self.folder / "log"
        logs = [log, *(Path(words[at + 1], "gateway.log") for at, word in enumerate(words) if word == "--folder")]
        with log.open("wb") as output:
            process = subprocess.Popen([sys.executable, "-m", module, *words], stdout=output, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + START_S_MAX
            while not any(READY.search(path.read_bytes()) for path in logs if path.is_file()):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.02)
            yield
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            assert process.wait(START_S_MAX) == 0, log.read_text()

    @contextmanager
    def gateway_for(self, words: list[str]) -> Iterator[None]:
        """The gateway that a command asks for: the one of its card, or of its port."""
        if "--card" in words:
            card = Path(words[words.index("--card") + 1])
            card.mkdir(parents=True)
            socket = sockets.socket_for_card(sockets.default_socket_dir(), card)
            asked = ["--embedded", "--folder", str(card), "--socket", str(socket), "--capacity-bytes", str(64 << 20)]
            with self.serving(asked, "xkv_store.daemon"):
                yield
            return
        asked = ["gateway", "run", "--card", str(self.folder / "nvme" / "xkv"), "--capacity", "64MiB"]
        for option in ("--port", "--socket-dir"):
            asked += [option, words[words.index(option) + 1]] if option in words else []
        with self.serving(asked, "xkv_store.cli"):
            yield


def publish(folder: Path) -> None:
    """Two engines' identities, on the gateway of the page's port."""
    for number, word in enumerate(("", "blue")):
        peer = Peer(folder / "run" / "xkv" / "5557.sock", geometry=Geometry())
        with closing(peer):
            peer.hello(engine=f"engine-{number}", role=wire.Role.SCHEDULER)
            peer.receive(wire.Welcome)
            namespace = bytes.fromhex(("3fa9", "3fb7")[number] + 28 * "0")
            peer.send(wire.PublishNamespace(namespace, json.dumps({**IDENTITY, "salt": word})))
            peer.send(wire.AskStatus(1))
            peer.receive(wire.Status)  # whatever came before it has been taken in


def _expected(words: list[str]) -> int:
    """The exit code: on an empty card all is a miss, and without a vLLM nobody makes hashes."""
    if words[0] != "why":
        return 0
    # With a configuration, its model is another than the identity's: no hash is needed.
    return 2 if "--tokens" in words and "--config" not in words and find_spec("vllm") is None else 1


def _once(lines: list[Line]) -> list[Line]:
    return list({line.text: line for line in lines}.values())


@pytest.mark.parametrize("line", _once(OURS), ids=lambda line: line.text)
def test_what_a_page_says_can_be_typed(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(tmp_path, monkeypatch)
    words = world.words(line)
    if words[:2] == ["gateway", "run"]:
        # A card is 64 GiB at most where no size is named, which is not what a test should take.
        size = [] if "--capacity" in words else ["--capacity", "64MiB"]
        with world.serving([*words, *size], "xkv_store.cli"):
            return
    if any(word in words for word in SERVES):
        with world.gateway_for(words):
            if words[0] == "why":
                publish(world.folder)
            assert cli.main(words, OTHERS) == _expected(words), capsys.readouterr()
    else:
        assert cli.main(words, OTHERS) == 0
    assert capsys.readouterr().out.strip()
