"""What the quick start tells people to type, with the release's own API server: serve, ask, stop, serve, ask again.

If this goes, nothing shows any more that the page's command starts a server, that a prompt comes back from the card
that the page names, and that the server's own /metrics says so.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from documents.lines import ROOT, blocks, split
from stand.models import LLAMA, prompt
from xkv_store import cli

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PAGES = ("README.md", "docs/quickstart.md")
BLOCK_TOKENS = 32  # what the CPU's attention takes; a GPU's default is 16
PROMPT_TOKENS = 1_100
READY_S_MAX = 240.0
END_S_MAX = 60.0
CAPACITY_BYTES = 64 << 20  # a card is 64 GiB at most where no size is named, which is not what a test should take
# A model with real weights, and a tokenizer with a word for each token.
WRITE = """
import sys
from pathlib import Path
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from stand.models import LLAMA, write
folder = Path(sys.argv[1])
write(LLAMA, folder)
words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(LLAMA.vocab_size)}, unk_token="w0"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1", bos_token="w2").save_pretrained(folder)
"""


def page_commands(page: str) -> tuple[list[str], dict[str, str]]:
    """The words of a page's `vllm serve`, and the variables that it exports before."""
    found = [line for block in blocks((ROOT / page).read_text(), "") for line in split(page, block)]
    (serve,) = [list(line.words) for line in found if line.program[:2] == ("vllm", "serve")]
    exported = [word.split("=") for line in found if line.program[0] == "export" for word in line.words[1:]]
    return serve, dict(exported)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "llama"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    subprocess.run([sys.executable, "-c", WRITE, str(folder)], env=environment, check=True, timeout=120)
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class Server:
    """`vllm serve`, answering."""

    def __init__(self, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"{self._base}{path}", timeout=20) as answer:
            text: str = answer.read().decode()
        return text

    def ask(self, tokens: list[int]) -> str:
        body = {"model": "page", "prompt": tokens, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        asked = urllib.request.Request(
            f"{self._base}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=120) as answer:
            text: str = json.load(answer)["choices"][0]["text"]
        return text

    def metric(self, name: str) -> float:
        """Of this server's one engine, with vLLM's labels."""
        found = [
            sample
            for family in text_string_to_metric_families(self.get("/metrics"))
            for sample in family.samples
            if sample.name == name
        ]
        assert all(sample.labels == {"model_name": "page", "engine": "0"} for sample in found)
        assert len(found) <= 1
        return found[0].value if found else 0.0


class World:
    """The page's command in a folder of its own: its home, its sockets, its card."""

    def __init__(self, page: str, model: Path, folder: Path) -> None:
        words, exported = page_commands(page)
        at = words.index("--kv-transfer-config") + 1
        config = json.loads(words[at])
        config["kv_connector_extra_config"]["xkv.capacity_bytes"] = CAPACITY_BYTES
        words[at] = json.dumps(config)
        assert words[:3] == ["vllm", "serve", "MODEL"]
        # The CPU build is a package of another name, and its `vllm` ends as it finds no version of `vllm`: this is what
        # its `serve` would run.
        self._words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *words[3:]]
        self._words += ["--served-model-name", "page", "--dtype", "float32", "--enforce-eager"]
        self._words += ["--block-size", str(BLOCK_TOKENS), "--max-model-len", "2048"]
        self.card = folder / "cache" / "xkv" / "card"
        self._log = folder / "log"
        (folder / "run").mkdir(mode=0o700)
        self._environment = {
            **os.environ,
            **exported,
            "XDG_CACHE_HOME": str(folder / "cache"),
            "XDG_RUNTIME_DIR": str(folder / "run"),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        }

    @contextmanager
    def serving(self) -> Iterator[Server]:
        port = free_port()
        with self._log.open("w") as log:
            process = subprocess.Popen(
                [*self._words, "--port", str(port)],
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            server = Server(port)
            deadline = time.monotonic() + READY_S_MAX
            while not self._answers(server):
                assert process.poll() is None, self._log.read_text()[-4_000:]
                assert time.monotonic() < deadline, self._log.read_text()[-4_000:]
                time.sleep(0.2)
            yield server
            process.send_signal(signal.SIGINT)
            process.wait(END_S_MAX)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    @staticmethod
    def _answers(server: Server) -> bool:
        try:
            server.get("/health")
        except OSError:
            return False
        return True


def status(card: Path, capture: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """As the page says: `xkv gateway status --card`."""
    capture.readouterr()
    assert cli.main(["gateway", "status", "--card", str(card), "--json"]) == 0
    found: dict[str, Any] = json.loads(capture.readouterr().out)
    return found


def test_pages_tell_the_same() -> None:
    told = []
    for page in PAGES:
        words, exported = page_commands(page)
        told.append(([*words[:-1], json.loads(words[-1])], exported))
    assert told[0] == told[1]


def test_a_prompt_is_restored_by_the_next_server(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World(PAGES[1], model, tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    tokens = prompt(LLAMA, tokens=PROMPT_TOKENS, seed=1)
    chunk_tokens = 16 * BLOCK_TOKENS
    chunks = PROMPT_TOKENS // chunk_tokens
    with world.serving() as first:
        answer = first.ask(tokens)
        assert re.fullmatch(r"( ?w\d+){8}", answer), answer
        deadline = time.monotonic() + END_S_MAX
        while status(world.card, capsys)["objects"] < chunks:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert first.metric("vllm:xkv_load_objects_total") == 0
    with world.serving() as second:
        assert second.ask(tokens) == answer
        assert second.metric("vllm:xkv_load_objects_total") == chunks
        assert second.metric("vllm:xkv_load_bytes_total") > 0
        assert second.metric("vllm:xkv_lookup_hits_total") >= chunks
    assert status(world.card, capsys)["objects"] == chunks
    assert cli.main(["gateway", "stop", "--card", str(world.card)]) == 0
