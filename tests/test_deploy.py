"""The service files: each line that they start must be one that the command line takes, in folders that they own.

Owns: reading the systemd unit, the container recipe and the sketch for Kubernetes, and what the design asks of them.
Must not know: how a gateway works. systemd itself judges the unit as well where it is there.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from documents.lines import ROOT, blocks, check_transfer_config, check_xkv, commands
from xkv_store import committer, gateway, io_pool

if TYPE_CHECKING:
    from collections.abc import Sequence

UNIT = ROOT / "deploy" / "xkv-gateway.service"
RECIPE = ROOT / "deploy" / "Containerfile"
SKETCH = ROOT / "docs" / "kubernetes.md"
# From SIGTERM to the end at the latest: what is in flight, what cannot be withdrawn, threads of the pool and the index.
END_S_MAX = gateway.DRAIN_S_MAX + gateway.DRAIN_WITHDRAWN_S_MAX + io_pool.JOIN_S_MAX + committer.JOIN_S_MAX
EXPOSURE_MAX = 1.0  # of 10, by systemd's own reckoning
SYSTEMD_S_MAX = 60
# What a gateway must not be given: nothing of it has a name there.
SHARED_MEMORY = ("/dev/shm", "hostIPC", "hostPID", "--ipc", "--privileged")


def _option(words: Sequence[str], name: str) -> str:
    return words[list(words).index(name) + 1]


def _is_below(path: str, folder: str) -> bool:
    return Path(path).is_relative_to(folder)


def _check_command(words: Sequence[str]) -> None:
    """A gateway's command: the program where it is installed, and options that there are."""
    assert words[0].endswith("/bin/xkv")
    check_xkv(words[1:])


# --- systemd ----------------------------------------------------------------------------------------------


def _unit() -> dict[str, dict[str, list[str]]]:
    sections: dict[str, dict[str, list[str]]] = {}
    here: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        if header := re.fullmatch(r"\[(\w+)\]", line):
            here = sections.setdefault(header[1], {})
            continue
        name, equals, value = line.partition("=")
        assert equals, line
        here.setdefault(name, []).append(value)
    return sections


def _service(name: str) -> str:
    (value,) = _unit()["Service"][name]
    return value


def test_the_unit_starts_what_the_command_line_takes() -> None:
    words = shlex.split(_service("ExecStart"))
    _check_command(words)
    assert _is_below(_option(words, "--card"), f"/var/lib/{_service('StateDirectory')}")
    assert _option(words, "--socket-dir") == f"/run/{_service('RuntimeDirectory')}"
    assert (_service("StateDirectoryMode"), _service("RuntimeDirectoryMode")) == ("0700", "0700")
    assert _unit()["Install"]["WantedBy"] == ["multi-user.target"]


def test_the_unit_waits_for_a_clean_end_and_does_not_repeat_a_mistake() -> None:
    assert float(_service("TimeoutStopSec")) > END_S_MAX
    assert (_service("Restart"), _service("RestartPreventExitStatus")) == ("on-failure", "2")


def test_the_unit_allows_what_the_design_needs_and_nothing_else() -> None:
    service = _unit()["Service"]
    closed = ("NoNewPrivileges", "PrivateDevices", "PrivateNetwork", "PrivateTmp", "ProtectHome", "LockPersonality",
              "MemoryDenyWriteExecute", "RestrictNamespaces", "RestrictRealtime", "RestrictSUIDSGID")  # fmt: skip
    assert {name: service[name] for name in closed} == {name: ["yes"] for name in closed}
    assert service["ProtectSystem"] == ["strict"]
    assert service["CapabilityBoundingSet"] == service["AmbientCapabilities"] == [""]
    assert service["RestrictAddressFamilies"] == ["AF_UNIX"]
    # Peers are known by their uid, and the kernel's boot id is read from /proc/sys: neither may be shut out.
    assert service["PrivateUsers"] == ["no"]
    assert service["ProcSubset"] == ["all"]
    assert "DynamicUser" not in service, "the engines run as the same user"
    assert int(_service("TasksMax")) > io_pool.IO_THREADS_MAX


def test_systemd_takes_the_unit_where_there_is_one(tmp_path: Path) -> None:
    """The tests above hold everywhere; this one has systemd's own word on names and values."""
    assert all(set(names) for names in _unit().values())
    if shutil.which("systemd-analyze") is None:
        return
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/xkv/bin/xkv", "/bin/true"))
    done = subprocess.run(
        ("systemd-analyze", "verify", str(unit)), capture_output=True, text=True, check=False, timeout=SYSTEMD_S_MAX
    )
    assert [line for line in (done.stdout + done.stderr).splitlines() if UNIT.name in line] == []
    command = ("systemd-analyze", "security", "--offline=yes", "--no-pager", str(unit))
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SYSTEMD_S_MAX)
    exposure = re.search(r"exposure level for \S+: ([\d.]+)", done.stdout)
    assert exposure is not None, done.stdout + done.stderr
    assert float(exposure[1]) <= EXPOSURE_MAX


# --- container --------------------------------------------------------------------------------------------


def _recipe() -> list[tuple[str, str]]:
    """Instructions and what they are given; comments are gone, lines that go on are one."""
    text = re.sub(r"(?m)^#.*\n", "", RECIPE.read_text())
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(name, rest.strip()) for name, _, rest in (line.strip().partition(" ") for line in lines)]


def _given(name: str) -> list[str]:
    return [rest for instruction, rest in _recipe() if instruction == name]


def test_the_container_starts_what_the_command_line_takes() -> None:
    (entry,), (command,), (health,) = _given("ENTRYPOINT"), _given("CMD"), _given("HEALTHCHECK")
    words = [*json.loads(entry), *json.loads(command)]
    _check_command(words)
    probe = json.loads(health.partition("CMD")[2])
    _check_command(probe)
    assert _option(probe, "--socket-dir") == _option(words, "--socket-dir")
    assert _option(probe, "--port") == _option(words, "--port")
    (volumes,) = _given("VOLUME")
    socket, card = json.loads(volumes)
    assert _option(words, "--socket-dir") == socket
    assert _is_below(_option(words, "--card"), card)
    assert _given("STOPSIGNAL") == ["SIGTERM"]


def test_the_container_is_made_of_what_is_there_and_is_not_root() -> None:
    copied = [words.split() for words in _given("COPY") if not words.startswith("--from")]
    assert copied
    for *sources, _into in copied:
        assert [source for source in sources if not (ROOT / source).exists()] == []
    assert _given("USER") == ["${UID}:${UID}"]
    (uid,) = [text.partition("=")[2] for text in _given("ARG") if text.startswith("UID=")]
    assert int(uid) > 0
    installs = [text for text in _given("RUN") if "pip install" in text]
    assert all("--require-hashes" in text or "--no-index" in text for text in installs), "nothing comes unchecked"
    (base,) = [text.partition("=")[2] for text in _given("ARG") if text.startswith("BASE=")]
    assert re.fullmatch(r"python:3\.\d+-slim", base), "a short name: where it comes from is the builder's own matter"


def test_the_page_runs_the_container_as_the_recipe_is() -> None:
    (run,) = [line.words for line in commands() if line.program[:2] == ("podman", "run")]
    (volumes,) = _given("VOLUME")
    mounted = [run[at + 1].split(":")[1] for at, word in enumerate(run) if word == "-v"]
    assert mounted == json.loads(volumes)
    (build,) = [line.words for line in commands() if line.program[:2] == ("podman", "build")]
    assert (ROOT / _option(build, "-f")).samefile(RECIPE)
    assert _option(build, "-t") == run[-1]


def test_the_page_installs_the_unit_that_is_there() -> None:
    (line,) = [line for line in commands() if line.program[:2] == ("install", "-m")]
    assert (ROOT / line.words[-2]).samefile(UNIT)
    (made,) = [line for line in commands() if line.program[0] == "useradd"]
    assert _service("User") == _service("Group") == made.words[-1], "the unit's user is there"
    (linked,) = [line for line in commands() if line.program[:2] == ("ln", "-s")]
    assert linked.words[2] == shlex.split(_service("ExecStart"))[0], "and so is the program that people type"
    started = [line.words[-1] for line in commands() if line.program[0] == "systemctl" and "daemon" not in line.text]
    assert set(started) == {UNIT.stem}


# --- Kubernetes -------------------------------------------------------------------------------------------


def _sketch() -> tuple[dict[str, Any], dict[str, Any]]:
    daemons, engine = (yaml.safe_load(text) for text in blocks(SKETCH.read_text(), "yaml"))
    assert (daemons["kind"], engine["kind"]) == ("DaemonSet", "Pod")
    pod: dict[str, Any] = daemons["spec"]["template"]
    assert daemons["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    return pod["spec"], engine["spec"]


def _mounts(pod: dict[str, Any]) -> dict[str, str]:
    """What a pod's one container sees of the node: path inside → path on the node."""
    (container,) = pod["containers"]
    volumes = {volume["name"]: volume["hostPath"]["path"] for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert len(mounts) == len(volumes), "each is mounted"
    return mounts


def test_the_sketch_s_gateway_is_started_as_the_command_line_takes_it() -> None:
    pod, _ = _sketch()
    (container,) = pod["containers"]
    (entry,) = _given("ENTRYPOINT")
    words = [*json.loads(entry), *container["args"]]
    assert all(isinstance(word, str) for word in words), "a number would be refused"
    _check_command(words)
    probe = container["readinessProbe"]["exec"]["command"]
    _check_command(probe)
    mounts = _mounts(pod)
    assert _option(words, "--socket-dir") == _option(probe, "--socket-dir")
    assert _option(words, "--socket-dir") in mounts
    assert any(_is_below(_option(words, "--card"), place) for place in mounts)
    assert pod["terminationGracePeriodSeconds"] > END_S_MAX
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_the_sketch_s_engine_meets_its_gateway() -> None:
    node, engine = _sketch()
    (container,) = engine["containers"]
    (flag,) = [text for text in container["args"] if text.startswith("--kv-transfer-config=")]
    extra = check_transfer_config(flag.partition("=")[2])
    (gateway_container,) = node["containers"]
    assert str(extra["xkv.port"]) == _option(gateway_container["args"], "--port")
    here, there = extra["xkv.socket_dir"], _option(gateway_container["args"], "--socket-dir")
    assert _mounts(engine)[here] == _mounts(node)[there], "the same folder of the node"
    assert engine["securityContext"]["runAsUser"] == node["securityContext"]["runAsUser"], "they prove each other's uid"
    assert engine["nodeSelector"] == node["nodeSelector"]
    assert {"name": "PYTHONHASHSEED", "value": "0"} in container["env"]


@pytest.mark.parametrize("path", [UNIT, RECIPE, SKETCH], ids=lambda path: path.name)
def test_nothing_asks_for_shared_memory_that_has_a_name(path: Path) -> None:
    """Rings go over the socket: a container's /dev/shm may be 64 MiB."""
    text = "\n".join(blocks(path.read_text(), "yaml")) if path.suffix == ".md" else path.read_text()
    used = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    assert [line for line in used for word in SHARED_MEMORY if word in line] == []
