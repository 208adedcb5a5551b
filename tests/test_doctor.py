"""`xkv doctor` as a person runs it: one healthy set-up, and broken ones, each found and named.

Real gateways, cards, limits and environments; what needs no engine at all is tried beside the core, in its
`test_doctor.py`, and each check on facts beside the package that it is of.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any

import pytest

from development.places import ROOT
from harness import release
from xkv_offload.doctor import command
from xkv_offload.why import command as why_command
from xkv_store import cli, contributed
from xkv_store.doctor import limits
from xkv_store.memory_limit import Roots
from xkv_store.testing.faults import Fault, FaultPlan, Kind, Operation
from xkv_store.testing.processes import PORT, running_gateway

if TYPE_CHECKING:
    from pathlib import Path

OTHERS = {"doctor": lambda: command.register}
LLAMA = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "torch_dtype": "bfloat16",
}
RING_BYTES = 64 << 20


class Setup:
    """An engine's configuration, the model, and the gateway's folder: well, until a test breaks one of them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.patch = monkeypatch
        self._capture = capture
        self.slot_bytes = 65_536
        self.extra: dict[str, Any] = {
            "spec_name": "XkvOffloadingSpec",
            "spec_module_path": "xkv_offload",
            "blocks_per_chunk": 4,
            "xkv.port": PORT,
            "xkv.socket_dir": str(folder / "sockets"),
            "xkv.fragment_bytes": self.slot_bytes - 1_024,
            "xkv.ring_bytes": RING_BYTES,
        }
        self.words = ["--model", str(folder), "--prefill-tokens-per-s", "1"]
        (folder / "config.json").write_text(json.dumps(LLAMA))
        monkeypatch.setenv("PYTHONHASHSEED", "0")
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
            monkeypatch.delenv(name, raising=False)

    def diagnose(self, *words: str, measures: bool = False) -> tuple[int, dict[str, Any]]:
        """The exit code and the report."""
        value = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": self.extra,
        }
        line = ["doctor", "--json", "--config", json.dumps(value), *self.words, *words]
        code = cli.main([*line, *([] if measures else ["--no-bandwidth"])], OTHERS)
        report: dict[str, Any] = json.loads(self._capture.readouterr().out)
        return code, report


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Setup:
    if importlib.util.find_spec("vllm"):
        release.names()  # imported without its warnings, whichever test comes first
    capsys.readouterr()  # what vLLM says then
    return Setup(tmp_path, monkeypatch, capsys)


def bad(report: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Faults and warnings by their check; each must say what follows and what to type."""
    found = {one["check"]: one for one in report["findings"] if one["severity"] in {"fault", "warning"}}
    assert all(one["follows"] and one["type"] for one in found.values())
    return found


def test_a_healthy_set_up(setup: Setup) -> None:
    with running_gateway(setup.folder):
        code, report = setup.diagnose(measures=True)
    expected: dict[str, dict[str, str]] = {}
    assert {name: one for name, one in bad(report).items() if name not in MACHINE} == expected
    assert (code, report["verdict"]) == (0, "well")
    model = report["measured"]["model"]
    assert model["rank_token_bytes"] == 131_072
    assert model["recommended_blocks_per_chunk"] in {plan["blocks_per_chunk"] for plan in model["chunks"]}
    assert model["break_even_tokens"] % 64 == 0, "one token takes a second to compute: a chunk is worth restoring"
    assert {"bandwidth", "get_s"} <= report["measured"].keys()


MACHINE = {"memlock", "memory", "O_DIRECT", "known fault"}
"""What may be so of the machine that this runs on: the healthy set-up is not about these."""

Break = Callable[[Setup], object]


def env(name: str, value: str | None) -> Break:
    """Set a variable, or take it away."""
    return lambda setup: setup.patch.delenv(name, raising=False) if value is None else setup.patch.setenv(name, value)


def key(name: str, value: object) -> Break:
    """Give a key of `kv_connector_extra_config` another value."""
    return lambda setup: setup.extra.update({name: value})


def lacking_tree(setup: Setup) -> None:
    tree = setup.folder / "tree" / "vllm"
    tree.mkdir(parents=True)
    (tree / "__init__.py").write_text("")
    setup.words += ["--source", str(tree.parent)]


def small_chunks(setup: Setup) -> None:
    (setup.folder / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 1}))
    setup.extra["blocks_per_chunk"] = 1
    setup.words += ["--dtype", "fp8", "--block-size", "1"]


def open_folder(setup: Setup) -> None:
    (setup.folder / "card").chmod(0o777)


def open_sockets(setup: Setup) -> None:
    (setup.folder / "sockets").chmod(0o777)


def file_system(flags: int = 0, **changes: int) -> Break:
    """What statvfs says of the card's: this machine's own is not a test's to fill, or to mount read-only."""

    def breaks(setup: Setup) -> None:
        usual = os.statvfs

        def other(path: Any) -> Any:
            found = usual(path)
            names = [name for name in dir(found) if name.startswith("f_")]
            values = {name: vars(type(found))[name].__get__(found) for name in names}
            return types.SimpleNamespace(**{**values, "f_flag": values["f_flag"] | flags, **changes})

        setup.patch.setattr(os, "statvfs", other)

    return breaks


def machine(*, group: str, available_kib: int) -> Break:
    """A control group's limit and the memory that is left: the kernel's files of another machine."""

    def breaks(setup: Setup) -> None:
        groups = setup.folder / "groups"
        own = setup.folder / "proc" / "self"
        own.mkdir(parents=True)
        groups.mkdir()
        (own / "cgroup").write_text("0::/\n")
        (setup.folder / "proc" / "meminfo").write_text(f"MemAvailable: {available_kib} kB\n")
        (groups / "memory.max").write_text(f"{group}\n")
        roots = Roots(proc=setup.folder / "proc", groups=groups)
        setup.patch.setattr(limits, "Roots", lambda: roots)

    return breaks


BROKEN: dict[str, tuple[Break, str, str]] = {
    "no seed": (env("PYTHONHASHSEED", None), "hash seed", "PYTHONHASHSEED is not set"),
    "a wrong seed": (env("PYTHONHASHSEED", "seven"), "hash seed", "'seven', which Python does not take"),
    "expandable segments": (
        env("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        "allocator",
        "has expandable_segments:True",
    ),
    "expandable segments by the newer name": (
        env("PYTORCH_ALLOC_CONF", "expandable_segments:True"),
        "allocator",
        "PYTORCH_ALLOC_CONF has expandable_segments:True",
    ),
    "a missing feature": (lacking_tree, "vLLM", "lacks what xkv cannot do without"),
    "an unknown key": (key("xkv.rnig_bytes", 1), "configuration", "unknown key 'xkv.rnig_bytes'"),
    "a chunk that wastes": (small_chunks, "chunk size", "blocks_per_chunk 1 is wasteful"),
    "fragments of another size": (key("xkv.fragment_bytes", 261_120), "fragment_bytes", "65536"),
    "a card that others may write to": (open_folder, "card", "others may write to the card's folder"),
    "sockets that others may write to": (open_sockets, "socket", "others may write to the socket folder"),
    "a read-only card": (file_system(flags=os.ST_RDONLY), "card", "is read-only"),
    "a full file system": (file_system(f_bavail=0), "room", "0 B are free"),
    "a small control group": (
        machine(group=str(RING_BYTES // 2), available_kib=1 << 30),
        "memory",
        "the control group's limit is 32 MiB",
    ),
    "a ring that is larger than memory": (
        machine(group="max", available_kib=1024),
        "memory",
        "1 MiB of memory are available, and the ring has 64 MiB",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_set_up(setup: Setup, name: str) -> None:
    breaks, check, words = BROKEN[name]
    with running_gateway(setup.folder):
        breaks(setup)
        code, report = setup.diagnose()
    assert words.replace("65536", "64512") in bad(report)[check]["what"]
    assert code == (1 if any(one["severity"] == "fault" for one in report["findings"]) else 0)
    if bad(report)[check]["severity"] == "fault":
        assert (code, report["verdict"]) == (1, "fault")


def test_no_gateway(setup: Setup) -> None:
    code, report = setup.diagnose()
    assert code == 1
    assert "no gateway listens" in bad(report)["gateway"]["what"]


def test_a_stopped_gateway(setup: Setup) -> None:
    with running_gateway(setup.folder) as gateway:
        gateway.signal(signal.SIGSTOP)
        code, report = setup.diagnose()
        gateway.signal(signal.SIGCONT)
        assert bad(report)["gateway"]["type"] == f"kill -CONT {gateway.pid}"
    assert code == 1


@pytest.mark.parametrize(
    ("fault", "check", "words"),
    [
        (Fault(operation=Operation.DIRECT, kind=Kind.ERROR, probability=1.0), "O_DIRECT", "refuses O_DIRECT"),
        (Fault(operation=Operation.WRITE, kind=Kind.ERROR, probability=1.0), "round trip", "was not stored"),
        (Fault(operation=Operation.COMMIT, kind=Kind.FULL, probability=1.0), "round trip", "was not stored"),
        (Fault(operation=Operation.READ, kind=Kind.FLIP, probability=1.0), "round trip", "cannot be read"),
    ],
    ids=["no O_DIRECT", "a medium that takes no writes", "a full index", "a medium that flips bits"],
)
def test_a_medium_that_is_broken(setup: Setup, fault: Fault, check: str, words: str) -> None:
    with running_gateway(setup.folder, faults=FaultPlan((fault,))):
        _, report = setup.diagnose()
    assert words in bad(report)[check]["what"]


LIMITED = """
import os, resource, time
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
if not os.geteuid():
    os.setuid(65534)
print("ready", flush=True)
time.sleep(60)
"""


@contextmanager
def started(code: str, environment: dict[str, str]) -> Iterator[int]:
    """The pid of a Python that has said `ready`."""
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process.pid
    finally:
        process.kill()
        process.communicate(timeout=60)


def test_another_process_s_limits_and_environment(setup: Setup) -> None:
    """A tiny memlock limit and no seed, of a process that runs; this one has neither fault."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    with running_gateway(setup.folder), started(LIMITED, environment) as pid:
        _, report = setup.diagnose("--pid", str(pid))
    assert "64 KiB of memory may be locked" in bad(report)["memlock"]["what"]
    assert "PYTHONHASHSEED is not set" in bad(report)["hash seed"]["what"]


@pytest.mark.parametrize(
    "words",
    [
        ["--config", "{"],
        ["--config", "{}", "--port", "1"],
        ["--model", "/nowhere"],
        ["--source", "/nowhere"],
        ["--tp", "0"],
        ["--prefill-tokens-per-s", "fast"],
    ],
)
def test_a_mistake_is_code_2_and_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json", *words], OTHERS) == 2
    output, errors = capsys.readouterr()
    assert errors == f"xkv: {json.loads(output)['error']}\n"


def test_the_package_says_that_it_brings_the_command() -> None:
    project = (ROOT / "packages" / "xkv-offload" / "pyproject.toml").read_text()
    _, _, group = project.partition(f"[project.entry-points.{contributed.GROUP}]\n")
    entries = dict(re.findall(r'(?m)^(\w+) = "([\w.:]+)"$', group.partition("\n[")[0]))
    assert entries.keys() == {"doctor", "why"}
    assert EntryPoint("doctor", entries["doctor"], contributed.GROUP).load() is command.register
    assert EntryPoint("why", entries["why"], contributed.GROUP).load() is why_command.register


def test_a_copy_without_metadata_has_a_way_in(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    line = [sys.executable, "-m", "xkv_offload.doctor", "--json", "--no-bandwidth", "--socket-dir", str(tmp_path)]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    assert any(one["check"] == "hash seed" for one in json.loads(done.stdout)["findings"])
