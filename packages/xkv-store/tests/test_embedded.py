"""The embedded gateway as a process: nobody's child, started once, from a copy under any name, with nothing of
the engine's environment; what it really serves is seen through a client.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import xkv_store
from xkv_store import embedded, sockets
from xkv_store.attachment import Attachment
from xkv_store.client import Client, GetObject, PutObject
from xkv_store.embedded import EmbeddedCard, daemon_arguments, daemon_environment, start_detached
from xkv_store.errors import UserError
from xkv_store.geometry import Geometry
from xkv_store.key import ObjectKey
from xkv_store.wire import LoadedObject, LoadStatus, Role, StoredObject, StoreStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WAIT_S_MAX = 20.0
GEOMETRY = Geometry(65_536)

FAKE_DAEMON = """\
import json, os, signal, sys
from . import errors
def report():
    return {
        "pid": os.getpid(), "ppid": os.getppid(), "sid": os.getsid(0), "argv": sys.argv[1:], "name": __name__,
        "package": __package__, "modules": sorted(sys.modules), "environ": dict(os.environ), "cwd": os.getcwd(),
        "errors": errors.__file__, "umask": os.umask(0o22), "path": sys.path,
        "fds": sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                      if os.path.exists(f"/proc/self/fd/{fd}")),
        "cores": sorted(os.sched_getaffinity(0)),
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    }
if __name__ == "__main__":
    folder = sys.argv[sys.argv.index("--folder") + 1]
    print("the daemon speaks", flush=True)
    text = json.dumps(report())
    with open(folder + "/report.new", "w") as file:
        file.write(text)
    os.rename(folder + "/report.new", folder + "/report")
    signal.pause()
"""

STARTER = """\
import os, pathlib, signal, sys
sys.path.insert(0, sys.argv[1])
from heavy.other_name.embedded import EmbeddedCard, start_detached
os.environ["SECRET"] = os.environ["LD_AUDIT"] = "x"
keep = os.open("/dev/null", os.O_RDONLY); os.set_inheritable(keep, True)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
folder = pathlib.Path(sys.argv[2])
print(start_detached(EmbeddedCard(folder=folder), folder / "x.sock"))
print(start_detached(EmbeddedCard(folder=folder), folder / "x.sock"))
"""


def wait_until(check: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S_MAX
    while not check():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.01)


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[-1].split()[0] != "Z"
    except OSError:
        return False


# --- arguments and environment ---------------------------------------------------------------------------


def test_arguments_are_those_that_the_daemon_takes(tmp_path: Path) -> None:
    card = EmbeddedCard(folder=tmp_path / "x" / "..")
    common = ["--embedded", "--folder", str(tmp_path), "--socket", "/s/1.sock"]
    assert daemon_arguments(card, Path("/s/1.sock")) == common
    card = EmbeddedCard(
        folder=tmp_path, capacity_bytes=1, databases=2, grace_ms=3, linger_s=4, io_threads=5, slot_bytes=6
    )
    options = "--capacity-bytes 1 --databases 2 --grace-ms 3 --linger-s 4 --io-threads 5 --slot-bytes 6"
    assert daemon_arguments(card, Path("/s/1.sock")) == [*common, *options.split()]


def test_environment_is_only_what_is_needed() -> None:
    """LD_PRELOAD, PYTHONSTARTUP, CUDA_… of the engine that came first would stay for all that come later."""
    given = dict.fromkeys(
        ["PATH", "HOME", "XDG_CACHE_HOME", "XKV_X", "LC_ALL", "LD_PRELOAD", "VLLM_X", "PYTHONSTARTUP"], "v"
    )
    kept = daemon_environment(given, ["", "/a", "/a", "/b:c"])
    assert kept.pop("PYTHONPATH").split(":") == [str(Path.cwd()), "/a"]
    assert sorted(kept) == ["HOME", "LC_ALL", "PATH", "XDG_CACHE_HOME", "XKV_X"]
    library = {"MC_X": "v", "MOONCAKE_X": "v", "GLOG_v": "1"}
    assert not daemon_environment(library, []).keys() & library.keys()
    assert daemon_environment(library, [], has_remote=True).items() >= library.items()


# --- the process, with a daemon that only looks around ---------------------------------------------------


@pytest.fixture
def vendored(tmp_path: Path) -> Path:
    """A folder with a copy of the package under another name, in a package that is heavy to import."""
    heavy = tmp_path / "v" / "heavy"
    copy = heavy / "other_name"
    shutil.copytree(Path(xkv_store.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (heavy / "__init__.py").write_text("import heavy_marker\n")
    (heavy / "json.py").write_text("raise RuntimeError('shadows')\n")
    (tmp_path / "v" / "heavy_marker.py").touch()
    (tmp_path / "v" / "sitecustomize.py").write_text("import heavy_marker\n")
    (copy / "daemon.py").write_text(FAKE_DAEMON)
    return tmp_path / "v"


@pytest.fixture
def report(vendored: Path, tmp_path: Path) -> Iterator[dict[str, Any]]:
    card = tmp_path / "card"
    command = [sys.executable, "-c", STARTER, str(vendored), str(card)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    path = card / "report"
    wait_until(path.exists)
    found = json.loads(path.read_text())
    assert isinstance(found, dict)
    yield found | {"starter": done.stdout.split(), "card": card}
    os.kill(found["pid"], signal.SIGKILL)


def test_it_does_not_stay_on_the_core_that_the_engine_was_pinned_to(report: dict[str, Any]) -> None:
    # vLLM's CPU worker pins itself and spins: a gateway on that core answered nothing for ten seconds.
    assert report["cores"] == sorted(os.sched_getaffinity(0))


def test_a_copy_under_another_name_starts_a_process_of_its_own(report: dict[str, Any], vendored: Path) -> None:
    """The engine kills its whole process tree; the gateway serves others, too."""
    assert report["starter"] == ["True", "False"], "one that lives is not started again"
    assert report["ppid"] in (1, os.getppid(), *subreapers()), "nobody's child"
    assert report["sid"] != os.getsid(0)
    assert report["argv"] == daemon_arguments(EmbeddedCard(folder=report["card"]), report["card"] / "x.sock")
    assert (report["name"], report["package"]) == ("__main__", "other_name")
    assert report["errors"] == str(vendored / "heavy" / "other_name" / "errors.py")
    unwanted = {"heavy", "heavy_marker", "sitecustomize", "torch", "vllm", "site"}
    assert not unwanted & set(report["modules"])
    assert "SECRET" not in report["environ"]
    assert "LD_AUDIT" not in report["environ"]
    assert report["umask"] == 0o077
    assert report["mask"] == []
    assert report["cwd"] == "/"
    log = str(report["card"] / "gateway.log")
    lock = str(report["card"] / "starter.lock")
    others = [name for name in report["fds"] if not name.startswith("/proc/")]
    assert sorted(others) == sorted(["/dev/null", log, log, lock]), "no inherited descriptor"
    assert embedded.last_log_line(report["card"]) == "the daemon speaks"


def subreapers() -> list[int]:
    """Ancestors of this process: where one of them adopts orphans, it is the parent."""
    found, pid = [], os.getpid()
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().split(")")[-1].split()[1])
        found.append(pid)
    return found


def test_bad_folders_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot be made .*xkv\.path"):
        start_detached(EmbeddedCard(folder=tmp_path / "file" / "x"), tmp_path / "1.sock")
    (tmp_path / "card" / "starter.lock").mkdir(parents=True)
    with pytest.raises(UserError, match=r"cannot be written .*xkv\.path"):
        start_detached(EmbeddedCard(folder=tmp_path / "card"), tmp_path / "1.sock")
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(UserError, match="/no/such/python"):
        start_detached(EmbeddedCard(folder=tmp_path / "new"), tmp_path / "1.sock")
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(UserError, match=r"xkv\.port"):
        start_detached(EmbeddedCard(folder=tmp_path / "new"), tmp_path / "1.sock")


def test_the_log_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "LOG_BYTES_MAX", 100)
    log = tmp_path / "gateway.log"
    for size in (0, 100, 101, 0):
        log.write_bytes(b"x" * size + b"\n" if size else b"")
        os.close(embedded._open_log(tmp_path))
    assert log.stat().st_size == 0
    assert (tmp_path / "gateway.log.1").stat().st_size == 102
    log.write_text("a\n" * 9_000 + "the last\n \n")
    assert embedded.last_log_line(tmp_path) == "the last"
    assert embedded.last_log_line(tmp_path / "none") == ""


# --- the real daemon -------------------------------------------------------------------------------------


@pytest.fixture
def attachment(tmp_path: Path) -> Attachment:
    card = EmbeddedCard(folder=tmp_path / "card", capacity_bytes=8 << 20, linger_s=0.5, slot_bytes=GEOMETRY.slot_bytes)
    return Attachment(
        socket=sockets.socket_for_card(tmp_path / "s", card.folder),
        engine_id="e",
        role=Role.RANK,
        rank=0,
        world_size=2,
        ring_bytes=64 * GEOMETRY.slot_bytes,
        load_reserve_bytes=16 * GEOMETRY.slot_bytes,
        staged_bytes=0,
        fragment_bytes=GEOMETRY.fragment_bytes,
        connect_timeout_ms=20_000,
        heartbeat_timeout_ms=3_000,
        embedded=card,
    )


def gateway_pid(attachment: Attachment) -> int:
    connection = sockets.connect(attachment.socket)
    assert connection is not None
    with connection:
        return sockets.peer_credentials(connection).pid


@pytest.mark.timeout(60)
def test_a_card_that_refuses_is_said_at_once(attachment: Attachment) -> None:
    """Otherwise each start with a wrong setting costs the whole time-out."""
    assert attachment.embedded is not None
    wrong = replace(attachment.embedded, slot_bytes=100)
    begun = time.monotonic()
    with pytest.raises(UserError, match="cannot serve: slot bytes must be a multiple"):
        Client.attach(replace(attachment, embedded=wrong))
    assert time.monotonic() - begun < attachment.connect_timeout_ms / 2_000
    Client.attach(attachment).close()  # and the line that stands in the log now refuses nothing


@pytest.mark.timeout(60)
def test_a_card_that_another_gateway_serves_is_said_soon(attachment: Attachment) -> None:
    assert attachment.embedded is not None
    elsewhere = attachment.socket.with_name("elsewhere.sock")
    first = Client.attach(replace(attachment, socket=elsewhere))
    (attachment.embedded.folder / embedded.STARTER_LOCK_NAME).unlink()  # as where a port's gateway has the card
    try:
        begun = time.monotonic()
        with pytest.raises(UserError, match="is in use by a gateway that does not listen"):
            Client.attach(attachment)
        assert time.monotonic() - begun < attachment.connect_timeout_ms / 2_000
    finally:
        first.close()


def test_who_comes_first_starts_it_and_everybody_attaches(attachment: Attachment) -> None:
    """Ranks and scheduler start at the same moment; a killed gateway is started again; it ends with the last."""
    clients: list[Client] = []
    try:
        for role, rank in ((Role.SCHEDULER, 0), (Role.RANK, 0), (Role.RANK, 1)):
            clients.append(Client.attach(replace(attachment, role=role, rank=rank)))
        first = gateway_pid(attachment)
        scheduler, writer = clients[0], clients[1]
        writer.publish_namespace(b"0" * 16, "{}")
        clients[2].publish_namespace(b"1" * 16, "{}")
        assert scheduler.await_namespaces(2, WAIT_S_MAX) == {0: (b"0" * 16, "{}"), 1: (b"1" * 16, "{}")}
        key = ObjectKey(b"n" * 16, 0, b"h" * 32, 0)
        put(writer, key, b"content")
        assert get(writer, key) == b"content"
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: all(client.epoch == 2 and client.alive() for client in clients))
        second = gateway_pid(attachment)
        assert second != first
        assert scheduler.table.lookup(key.tag) is not None, "hits survive the gateway's end"
        assert get(writer, key) == b"content"
        assert scheduler.await_namespaces(2, WAIT_S_MAX)[1] == (b"1" * 16, "{}"), "published again"
    finally:
        for client in clients:
            client.close()
    wait_until(lambda: not is_there(second))


def put(client: Client, key: ObjectKey, content: bytes) -> None:
    slots = client.store_region.take(1)
    assert slots is not None
    client.ring.slot(slots[0])[1_024 : 1_024 + len(content)] = content
    answers: list[StoredObject] = []
    client.put([PutObject(key, len(content), slots, 1, 0, replace=False)], answers.append)
    wait_until(lambda: answers)
    assert answers == [StoredObject(0, StoreStatus.CONFIRMED)]


def get(client: Client, key: ObjectKey) -> bytes:
    slots = client.load_region.take(1)
    assert slots is not None
    client.ring.array[slots[0]] = 0xEE
    answers: list[LoadedObject] = []
    client.get([GetObject(key, slots, 0)], answers.append)
    wait_until(lambda: answers)
    assert answers[0].status is LoadStatus.OK
    content = bytes(client.ring.slot(slots[0])[1_024 : 1_024 + answers[0].length])
    client.load_region.give(slots)
    return content
