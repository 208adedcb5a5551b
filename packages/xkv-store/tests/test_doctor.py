"""`xkv doctor` without an engine: a healthy gateway and card are well, and what is broken is found and named."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from xxhash import xxh3_64_intdigest

from xkv_store import cli, contributed, sockets
from xkv_store.doctor import examination, limits, medium, round_trip, service
from xkv_store.doctor import findings as said
from xkv_store.doctor import folder as folders
from xkv_store.doctor.findings import Severity
from xkv_store.geometry import FRAGMENT_BYTES
from xkv_store.memory_limit import Roots
from xkv_store.sockets import Peer
from xkv_store.testing.faults import Fault, FaultPlan, Kind, Operation
from xkv_store.testing.processes import PORT, running_gateway
from xkv_store.wire import LoadStatus, StoreStatus

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xkv_store.doctor.findings import Finding
    from xkv_store.huge_pages import Mapping

MIB = 1 << 20
NOBODY = 65_534  # a user without privileges, on every Linux
CHILD_S_MAX = 60.0


class Doctor:
    """Runs `xkv doctor --json` in this process, with no other package's command in its place."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture
        self.report: dict[str, Any] = {}

    def __call__(self, *words: str | Path) -> int:
        code = cli.main(["doctor", "--json", *map(str, words)], {})
        self.report = json.loads(self._capture.readouterr().out)
        return code

    def found(self, check: str, severity: Severity) -> dict[str, str]:
        """The one finding of that check and severity, which must say what follows and what to type."""
        (one,) = [one for one in self.report["findings"] if (one["check"], one["severity"]) == (check, severity.value)]
        if severity in {Severity.FAULT, Severity.WARNING}:
            assert one["follows"]
            assert one["type"]
        return dict(one)

    def severities(self) -> set[str]:
        return {one["severity"] for one in self.report["findings"]}


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Doctor:
    return Doctor(capsys)


def place(folder: Path) -> tuple[str, str]:
    return "--socket-dir", str(folder / "sockets")


# --- well -----------------------------------------------------------------------------------------------------


def test_a_healthy_gateway_is_well_and_nothing_is_left_behind(tmp_path: Path, doctor: Doctor) -> None:
    with running_gateway(tmp_path) as gateway:
        before = sorted(path.name for path in (tmp_path / "card").iterdir())
        assert doctor(*place(tmp_path), "--ring", "4MiB") == 0, doctor.report
        assert doctor.report["verdict"] == "well"
        assert doctor.severities() <= {"ok", "note"}
        assert "bytes through the ring" in doctor.found("round trip", Severity.OK)["what"]
        bandwidth = doctor.report["measured"]["bandwidth"]
        assert 0 < bandwidth["moved_bytes"] <= medium.BYTES_MAX
        assert min(bandwidth["read_bytes_per_s"], bandwidth["write_bytes_per_s"]) > 0
        assert sorted(path.name for path in (tmp_path / "card").iterdir()) == before, "the throw-away card is gone"
        assert cli.main(["gateway", "status", "--json", "--socket", gateway.ready["socket"]], {}) == 0


@pytest.mark.parametrize("other_way", ["native", "python"])
def test_which_way_checksums_are_made_is_said_of_the_gateway(
    tmp_path: Path, doctor: Doctor, monkeypatch: pytest.MonkeyPatch, other_way: str
) -> None:
    """Not of the Python that asks: it is another where the gateway has an environment of its own."""
    monkeypatch.setattr(examination, "path_word", lambda: other_way)
    with running_gateway(tmp_path) as gateway:
        way = gateway.ready["checksums"]
        assert doctor(*place(tmp_path), "--no-bandwidth") == 0
        found = doctor.found("checksums", Severity.OK if way == "native" else Severity.NOTE)
        assert found["what"].startswith({"native": "made by the native library", "python": "made by Python"}[way])
    assert doctor(*place(tmp_path), "--no-bandwidth") == 1, "no gateway: what this Python would do is all that is known"
    doctor.found("checksums", Severity.OK if other_way == "native" else Severity.NOTE)


def test_the_object_of_the_round_trip_has_left_the_card(tmp_path: Path, doctor: Doctor, capsys: Any) -> None:
    with running_gateway(tmp_path) as gateway:
        assert doctor(*place(tmp_path), "--no-bandwidth") == 0
        assert cli.main(["gateway", "status", "--json", "--socket", gateway.ready["socket"]], {}) == 0
        status = json.loads(capsys.readouterr().out)
    assert status["objects"] == 0
    assert status["counters"]["puts_confirmed"] == 1, "there was one"
    assert status["sessions"] == [] or all(one["role"] == "tool" for one in status["sessions"])


def test_a_person_reads_what_follows_and_what_to_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", *place(tmp_path), "--no-bandwidth"], {}) == 1
    text = capsys.readouterr().out
    assert "fault    gateway" in text
    assert "follows: " in text
    assert f"type:    xkv gateway run --port {PORT}" in text
    assert "not looked at: xkv-offload is not installed" in text, "and that a part was left out"
    assert max(map(len, text.splitlines())) <= said.TEXT_COLUMNS


@pytest.mark.parametrize("words", [["--pid", "999999999"], ["--card", ""], ["--port", "0"], ["--ring", "much"]])
def test_a_mistake_is_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--no-bandwidth", *words], {}) == 2
    assert "Traceback" not in capsys.readouterr().err


# --- the gateway ------------------------------------------------------------------------------------------------


def test_no_gateway(tmp_path: Path, doctor: Doctor) -> None:
    assert doctor(*place(tmp_path), "--no-bandwidth") == 1
    assert f"no gateway listens on {tmp_path}" in doctor.found("gateway", Severity.FAULT)["what"]
    assert "not tried" in doctor.found("round trip", Severity.NOTE)["what"]


def test_a_card_whose_gateway_an_engine_starts_needs_none(tmp_path: Path, doctor: Doctor) -> None:
    assert doctor(*place(tmp_path), "--card", tmp_path / "card", "--no-bandwidth") == 0
    assert "an engine starts one" in doctor.found("gateway", Severity.NOTE)["what"]
    assert "can be made" in doctor.found("card", Severity.OK)["what"]
    assert list(tmp_path.iterdir()) == [], "looking makes nothing"


def test_a_stopped_gateway(tmp_path: Path, doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service.gather_gateway, "__defaults__", (1.0,))
    with running_gateway(tmp_path) as gateway:
        gateway.signal(signal.SIGSTOP)
        assert doctor(*place(tmp_path), "--no-bandwidth") == 1
        found = doctor.found("gateway", Severity.FAULT)
        assert "stopped by a signal" in found["what"]
        assert found["type"] == f"kill -CONT {gateway.pid}"
        gateway.signal(signal.SIGCONT)
        assert doctor(*place(tmp_path), "--no-bandwidth") == 0, "which mends it"


def test_a_gateway_that_listens_and_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "sockets" / f"{PORT}.sock"
    listener = sockets.Listener.open(path)
    try:
        facts = service.gather_gateway(path, 0.2)
    finally:
        listener.close()
    assert facts.state is service.State.SILENT
    (found,) = service.examine_gateway(facts, path=path, embedded=False, fragment_bytes=None, trusted_uids=frozenset())
    assert found.severity is Severity.FAULT
    assert f"kill -9 {os.getpid()}" in found.remedy


OLD_GATEWAY = """
import sys
import xkv_store.wire as wire
wire.PROTOCOL_VERSION -= 1
from xkv_store import cli
sys.exit(cli.main(sys.argv[1:], {}))
"""


@contextmanager
def child(code: str, *words: str, ready: bytes = b"ready") -> Iterator[subprocess.Popen[bytes]]:
    """A Python that has said `ready`, ended by its pid."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    command = [sys.executable, "-c", code, *words]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        assert ready in process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate(timeout=CHILD_S_MAX)


def test_a_gateway_of_an_older_protocol(tmp_path: Path, doctor: Doctor) -> None:
    words = ["gateway", "run", "--port", str(PORT), *place(tmp_path), "--card", str(tmp_path / "card")]
    with child(OLD_GATEWAY, *words, "--capacity", "64MiB"):
        assert doctor(*place(tmp_path), "--no-bandwidth") == 1
    found = doctor.found("gateway", Severity.FAULT)
    assert "version" in found["what"]
    assert "one release" in found["type"]


def test_an_engine_whose_fragments_are_not_the_card_s(tmp_path: Path) -> None:
    with running_gateway(tmp_path) as gateway:
        facts = service.gather_gateway(Path(gateway.ready["socket"]))
    found = service.examine_gateway(
        facts, path=tmp_path, embedded=False, fragment_bytes=FRAGMENT_BYTES, trusted_uids=frozenset()
    )
    (wrong,) = [one for one in found if one.severity is Severity.FAULT]
    assert wrong.remedy == "set xkv.fragment_bytes to 64512"


def test_another_user_s_gateway_is_not_trusted_unless_it_is_named() -> None:
    facts = service.GatewayFacts(state=service.State.ANSWERS, peer=Peer(1, os.geteuid() + 7, 1))
    (found,) = service.examine_gateway(
        facts, path=Path("s"), embedded=False, fragment_bytes=None, trusted_uids=frozenset()
    )
    assert found.severity is Severity.FAULT
    assert found.remedy == f"set xkv.gateway_uid to {os.geteuid() + 7}"


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (service.State.FOREIGN, "take another port"),
        (service.State.REFUSES, "the gateway's log"),
        (service.State.UNREACHABLE, "type this"),
    ],
)
def test_whatever_else_asking_brings_says_what_to_type(state: service.State, words: str) -> None:
    facts = service.GatewayFacts(state=state, error="it is so; type this")
    (found,) = service.examine_gateway(
        facts, path=Path("s"), embedded=True, fragment_bytes=None, trusted_uids=frozenset()
    )
    assert (found.severity, "it is so" in found.what) == (Severity.FAULT, True)
    assert words in found.remedy


def test_a_socket_of_another_program(tmp_path: Path) -> None:
    path = tmp_path / "sockets" / "1.sock"
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(path))
        other.listen()
        facts = service.gather_gateway(path, 0.2)
    assert (facts.state, "no xkv gateway" in facts.error) == (service.State.UNREACHABLE, True)


STATUS: dict[str, Any] = {
    "slot_bytes": 4096,
    "draining": False,
    "version": "0.0.0",
    "counters": {"dropped_corrupt": 2, "dropped_unreadable": 1, "commits_failed": 3},
    "slots": {"free": 1},
    "capacity_bytes": 4096,
    "objects": 1,
    "card": "/c",
}


def test_damage_and_failed_commits_of_this_life_are_told() -> None:
    facts = service.GatewayFacts(
        state=service.State.ANSWERS, peer=Peer(1, os.geteuid(), 1), status={**STATUS, "draining": True}
    )
    found = service.examine_gateway(
        facts, path=Path("s"), embedded=False, fragment_bytes=None, trusted_uids=frozenset()
    )
    text = " ".join(one.what for one in found if one.severity is Severity.WARNING)
    assert "3 objects were damaged" in text
    assert "3 commits" in text
    assert "is ending" in text
    assert any("release 0.0.0" in one.what for one in found if one.severity is Severity.NOTE)


REMOTE: dict[str, Any] = {
    "master": "m:1",
    "state": "up",
    "reason": "",
    "host": "h:2",
    "segment_bytes": 0,
    "segment_state": "none",
    "segment_reason": "",
}


def of_remote(counters: dict[str, int], **changes: object) -> list[Finding]:
    status = {**STATUS, "counters": counters, "remote": {**REMOTE, **changes}}
    facts = service.GatewayFacts(state=service.State.ANSWERS, peer=Peer(1, os.geteuid(), 1), status=status)
    found = service.examine_gateway(
        facts, path=Path("s"), embedded=False, fragment_bytes=None, trusted_uids=frozenset()
    )
    return [one for one in found if one.check == "remote"]


def test_a_remote_that_is_there_is_well() -> None:
    (found,) = of_remote({"remote_fetches": 3, "remote_stores": 4})
    assert found.severity is Severity.OK
    assert "3 objects came, 4 went" in found.what


@pytest.mark.parametrize(
    ("counters", "changes", "words"),
    [
        ({}, {"state": "down", "reason": "the master is deaf"}, "the master is deaf"),
        ({}, {"segment_state": "down", "segment_bytes": 1 << 30, "segment_reason": "no memory"}, "1 GiB are not in"),
        ({"remote_late_look": 2, "remote_late_load": 3}, {}, "5 calls"),
        ({"remote_fetches_corrupt": 7}, {}, "7 objects came"),
    ],
)
def test_what_is_wrong_with_a_remote_is_a_warning_and_says_what_to_do(
    counters: dict[str, int], changes: dict[str, object], words: str
) -> None:
    """The card serves on, so it is no fault."""
    (found,) = of_remote(counters, **changes)
    assert found.severity is Severity.WARNING
    assert words in found.what
    assert found.remedy


# --- the socket -------------------------------------------------------------------------------------------------


def socket_findings(path: Path, uid: int | None = None) -> list[Finding]:
    uid = os.geteuid() if uid is None else uid
    return service.examine_socket(service.gather_socket(path), uid=uid, trusted_uids=frozenset())


def test_a_socket_folder_that_others_may_write_to(tmp_path: Path) -> None:
    path = tmp_path / "sockets" / "1.sock"
    path.parent.mkdir()
    path.parent.chmod(0o777)
    (found,) = socket_findings(path)
    assert (found.severity, found.remedy) == (Severity.FAULT, f"chmod 700 {path.parent}")
    path.parent.chmod(0o700)
    (found,) = socket_findings(path)
    assert found.severity is Severity.OK


def test_links_and_other_people_s_sockets(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    (found,) = socket_findings(tmp_path / "link" / "1.sock")
    assert "is a link" in found.what
    (tmp_path / "real" / "1.sock").symlink_to("nowhere")
    (found,) = socket_findings(tmp_path / "real" / "1.sock")
    assert (found.severity, "is a link" in found.what) == (Severity.WARNING, True)
    (found,) = socket_findings(Path("/usr/1.sock"), uid=NOBODY)
    assert found.severity is Severity.OK, "root's folder is trusted"
    assert socket_findings(tmp_path / "none" / "1.sock") == []
    if os.geteuid():
        return
    os.chown(tmp_path / "real", NOBODY, -1)
    (first, *_) = socket_findings(tmp_path / "real" / "2.sock")
    assert f"belongs to uid {NOBODY}" in first.what


# --- the card ---------------------------------------------------------------------------------------------------


def card_findings(folder: Path, **changes: Any) -> dict[str, Finding]:
    facts = dataclasses.replace(folders.gather_folder(folder), **changes)
    uid = os.geteuid()
    found = [
        folders.examine_owner(facts, uid=uid),
        *folders.examine_databases(facts, uid=uid),
        folders.examine_room(facts, capacity_bytes=MIB),
        folders.examine_direct(facts, None),
    ]
    return {one.check: one for one in found}


# Tells what another user than root finds; where the tests are not root's, it is that user already.
AS_NOBODY = f"""
import contextlib, io, os, sys
from xkv_store import cli
with contextlib.redirect_stdout(io.StringIO()):
    cli.main(sys.argv[1:], {{}})  # all that is imported on the way: Python itself may lie where only root gets
if not os.geteuid():
    os.setgroups([])
    os.setgid({NOBODY})
    os.setuid({NOBODY})
sys.exit(cli.main(sys.argv[1:], {{}}))
"""


def as_nobody(*words: str) -> dict[str, Any]:
    """What `xkv doctor` reports to a user who is not root."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, "doctor", "--json", "--no-bandwidth", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=CHILD_S_MAX,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    (found,) = [one for one in report["findings"] if one["check"] == "card"]
    return dict(found)


def test_a_card_of_another_user(tmp_path: Path) -> None:
    """Root's, seen by one who is not root: `/usr` is such a folder on every machine."""
    found = as_nobody("--card", "/usr", *place(tmp_path))
    assert found["severity"] == "fault"
    assert "belongs to uid 0" in found["what"]
    assert "no gateway of this user can serve" in found["follows"]
    assert "chown -R" in found["type"]


def test_a_card_that_its_own_user_may_not_write_to(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as name:  # where another user gets, too
        folder = Path(name, "card")
        folder.mkdir()
        Path(name).chmod(0o755)
        if not os.geteuid():
            os.chown(folder, NOBODY, -1)
        folder.chmod(0o500)
        found = as_nobody("--card", str(folder), *place(tmp_path))
        assert found["severity"] == "fault"
        assert f"may not write to {folder}" in found["what"]
        assert found["type"].startswith(f"chmod u+rwx {folder}")


def test_a_card_whose_owner_is_another_and_that_can_be_written_all_the_same(tmp_path: Path) -> None:
    """As by root."""
    facts = folders.gather_folder(tmp_path)
    found = folders.examine_owner(dataclasses.replace(facts, writable=True), uid=os.geteuid() + 7)
    assert (found.severity, "read and alter" in found.follows) == (Severity.WARNING, True)


def test_a_card_that_others_may_write_to(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    found = card_findings(tmp_path)["card"]
    assert (found.severity, found.remedy) == (Severity.FAULT, f"chmod go-w {tmp_path}")
    tmp_path.chmod(0o1777)
    found = card_findings(tmp_path)["card"]
    assert (found.severity, "chmod" in found.remedy) == (Severity.FAULT, False), "as /tmp, which is everybody's"


def test_a_read_only_card(tmp_path: Path) -> None:
    found = card_findings(tmp_path, is_read_only=True)["card"]
    assert "is read-only" in found.what
    assert "remount,rw" in found.remedy
    found = card_findings(tmp_path, writable=False)["card"]
    assert found.remedy.startswith(f"chmod u+rwx {tmp_path}")


def test_a_file_system_is_known_to_be_read_only() -> None:
    """Where this machine has one that anybody can see."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    read_only = [Path(fields[1]) for fields in mounts if "ro" in fields[3].split(",") and os.path.isdir(fields[1])]  # noqa: PTH112  never raises
    assert all(folders.gather_folder(path).is_read_only for path in read_only[:3])
    assert not folders.gather_folder(Path("/proc/self")).is_read_only


def test_a_full_file_system(tmp_path: Path) -> None:
    found = card_findings(tmp_path, free_bytes=0)["room"]
    assert "cannot be made" in found.follows
    (tmp_path / "db-0.xkv").write_bytes(bytes(8192))
    found = card_findings(tmp_path, free_bytes=MIB)["room"]
    assert (found.severity, "index cannot grow" in found.follows) == (Severity.FAULT, True)
    assert card_findings(tmp_path)["room"].severity is Severity.OK


def test_databases_that_lead_nowhere_or_are_not_ours(tmp_path: Path) -> None:
    database = tmp_path / "db-0.xkv"
    database.symlink_to(tmp_path / "gone")
    found = card_findings(tmp_path)["database"]
    assert "leads to nothing" in found.what
    assert str(tmp_path / "gone") in found.remedy
    facts = folders.gather_folder(tmp_path)
    (link,) = facts.databases
    others = dataclasses.replace(link, link_uid=os.geteuid() + 7)
    locked = dataclasses.replace(link, link_uid=None, target=tmp_path.stat(), writable=False)
    facts = dataclasses.replace(facts, databases=(others, locked))
    first, second = folders.examine_databases(facts, uid=os.geteuid())
    assert f"uid {os.geteuid() + 7} has made" in first.what
    assert "may not be written" in second.what


@pytest.mark.parametrize(
    ("version", "said"), [(2, "format version 2; this program knows version 1"), (0, "is not a database of a card")]
)
def test_a_card_that_no_gateway_of_this_release_takes(tmp_path: Path, version: int, said: str) -> None:
    """Of a newer release, or spoilt."""
    with running_gateway(tmp_path) as gateway:
        gateway.signal(signal.SIGTERM)
        assert gateway.wait() == 0
    card = tmp_path / "card"
    assert "database" not in card_findings(card)
    with (card / "db-0.xkv").open("r+b") as file:
        for offset in (0, 4_096):
            block = bytearray(os.pread(file.fileno(), 4_096, offset))
            block[:10] = block[:8] + version.to_bytes(2, "little") if version else bytes(10)
            block[4_088:] = xxh3_64_intdigest(block[:4_088]).to_bytes(8, "little")
            os.pwrite(file.fileno(), block, offset)
    found = card_findings(card)["database"]
    assert (found.severity, said in found.what) == (Severity.FAULT, True), found
    assert "another folder" in found.remedy or "another path" in found.remedy
    (card / "db-0.xkv").unlink()
    os.mkfifo(card / "db-0.xkv")
    assert "neither a file nor a block device" in card_findings(card)["database"].what


def test_a_file_system_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert folders.gather_folder(tmp_path).direct in {True, False, None}
    usual = os.open

    def refusing(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return usual(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refusing)
    found = card_findings(tmp_path)["O_DIRECT"]
    assert found.severity is Severity.WARNING
    assert "page cache" in found.follows


def test_a_gateway_that_runs_without_direct_io(tmp_path: Path, doctor: Doctor) -> None:
    refused = Fault(operation=Operation.DIRECT, kind=Kind.ERROR, probability=1.0)
    with running_gateway(tmp_path, faults=FaultPlan((refused,))):
        assert doctor(*place(tmp_path), "--no-bandwidth") == 0
    assert "refuses O_DIRECT" in doctor.found("O_DIRECT", Severity.WARNING)["what"]


@pytest.mark.parametrize("operation", [Operation.WRITE, Operation.READ])
def test_a_medium_that_fails_is_found_by_the_round_trip(tmp_path: Path, doctor: Doctor, operation: Operation) -> None:
    failing = Fault(operation=operation, kind=Kind.ERROR, probability=1.0, error=errno.EIO)
    with running_gateway(tmp_path, faults=FaultPlan((failing,))):
        assert doctor(*place(tmp_path), "--no-bandwidth") == 1
    what = doctor.found("round trip", Severity.FAULT)["what"]
    assert ("not stored" in what) == (operation is Operation.WRITE)
    assert ("cannot be read" in what) == (operation is Operation.READ)


def test_bytes_that_came_back_others_are_a_fault() -> None:
    """No medium can bring that about while the gateway proves what it reads: the facts are made up."""
    facts = round_trip.TripFacts(stored=StoreStatus.CONFIRMED, loaded=LoadStatus.OK, equal=False, forgotten=False)
    wrong, left = round_trip.examine_trip(facts)
    assert "other bytes" in wrong.what
    assert left.severity is Severity.NOTE
    (full,) = round_trip.examine_trip(round_trip.TripFacts(stored=StoreStatus.SHED))
    assert full.severity is Severity.WARNING
    (never,) = round_trip.examine_trip(round_trip.TripFacts(error="it is so; type this"))
    assert (never.what, never.remedy) == ("it is so", "type this")


def test_a_card_in_another_container_is_not_judged(tmp_path: Path, doctor: Doctor) -> None:
    with running_gateway(tmp_path) as gateway:
        facts = service.gather_gateway(Path(gateway.ready["socket"]))
        (tmp_path / "card").rename(tmp_path / "elsewhere")
        doctor(*place(tmp_path), "--no-bandwidth")
        (tmp_path / "elsewhere").rename(tmp_path / "card")
    assert facts.state is service.State.ANSWERS
    assert "not seen from here" in doctor.found("card", Severity.NOTE)["what"]


@pytest.mark.parametrize(("kind", "words"), [("file", "is no folder"), ("gone", "leads to"), ("loop", "leads to")])
def test_a_card_that_can_be_no_folder(tmp_path: Path, doctor: Doctor, kind: str, words: str) -> None:
    """No engine starts there, and no gateway makes a folder in its place."""
    place = tmp_path / kind
    if kind == "file":
        place.touch()
    else:
        place.symlink_to(place if kind == "loop" else tmp_path / "nowhere")
    assert doctor("--card", place, "--no-bandwidth") == 1
    assert words in doctor.found("card", Severity.FAULT)["what"]


def test_measuring_needs_room_and_a_place_to_write(tmp_path: Path, doctor: Doctor) -> None:
    with pytest.raises(Exception, match="too few to measure"):
        medium.measure(tmp_path, medium.Effort(), free_bytes=MIB)
    with pytest.raises(Exception, match="nothing can be made"):
        medium.measure(tmp_path / "none", medium.Effort(), free_bytes=1 << 30)
    assert list(tmp_path.iterdir()) == []


def test_measuring_ends_in_time_and_counts_what_was_moved(tmp_path: Path) -> None:
    measured = medium.measure(tmp_path, medium.Effort(seconds_max=0.0, threads=1), free_bytes=64 * MIB * 4)
    assert 0 < measured.moved_bytes < 8 * MIB, "the first is always done, and after it there is no time"
    assert list(tmp_path.iterdir()) == []


# --- limits -----------------------------------------------------------------------------------------------------

LIMITED = f"""
import os, resource, time
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
if not os.geteuid():
    os.setuid({NOBODY})  # and with it goes the right to lock without a limit
print("ready", flush=True)
time.sleep({CHILD_S_MAX})
"""


def test_a_tiny_memlock_limit_of_a_running_process(tmp_path: Path, doctor: Doctor) -> None:
    with child(LIMITED) as process:
        doctor(*place(tmp_path), "--no-bandwidth", "--pid", str(process.pid), "--ring", "64MiB")
    found = doctor.found("memlock", Severity.WARNING)
    assert "64 KiB of memory may be locked, and the ring has 64 MiB" in found["what"]
    assert "LimitMEMLOCK=infinity" in found["type"], "its hard limit is as low: it cannot raise it itself"


def test_a_limit_that_the_process_can_raise_itself() -> None:
    low = limits.Limits(
        memlock_bytes=1024, memlock_hard_bytes=None, locks_freely=False, group=None, available_bytes=None
    )
    assert limits.examine_memlock(low, ring_bytes=MIB).remedy.startswith("ulimit -l 1024")
    for enough in (dataclasses.replace(low, memlock_bytes=MIB), dataclasses.replace(low, locks_freely=True)):
        assert limits.examine_memlock(enough, ring_bytes=MIB).severity is Severity.OK


def machine(folder: Path, *, cgroup: str, files: dict[str, str]) -> Roots:
    """The kernel's files of another machine: this one's limits are not a test's to set."""
    own = folder / "proc" / "self"
    own.mkdir(parents=True)
    (own / "status").write_text("CapEff:\t0000000000000000\n")
    (own / "cgroup").write_text(cgroup)
    (folder / "proc" / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    2048 kB\n")
    for name, text in files.items():
        path = folder / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Roots(proc=folder / "proc", groups=folder / "groups")


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        ("0::/a/b\n", {"memory.max": "max\n", "a/memory.max": "1048576\n", "a/b/memory.max": "max\n"}),
        ("0::/a/b\n", {"a/b/memory.max": "1048576\n", "a/memory.max": "9999999999\n"}),
        ("4:cpu,memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": "1048576\n"}),
        ("4:memory:/a\n0::/u\n", {"unified/u/memory.max": "1048576\n", "memory/memory.limit_in_bytes": "9" * 19}),
        ("4:memory:/on/the/host\n", {"memory/memory.limit_in_bytes": "1048576\n"}),
    ],
    ids=["version 2, above", "version 2, own", "version 1", "both", "a container's"],
)
def test_a_small_memory_limit(tmp_path: Path, cgroup: str, files: dict[str, str]) -> None:
    found = limits.gather_limits(roots=machine(tmp_path, cgroup=cgroup, files=files))
    assert found.group is not None
    assert found.group.limit_bytes == MIB
    assert found.available_bytes == 2 * MIB
    assert not found.locks_freely
    small = limits.examine_memory(found, ring_bytes=2 * MIB)
    assert (small.severity, "1 MiB" in small.what) == (Severity.FAULT, True)
    assert limits.examine_memory(found, ring_bytes=MIB - 1).severity is Severity.WARNING
    assert limits.examine_memory(found, ring_bytes=1024).severity is Severity.OK


def test_no_limit_and_little_memory(tmp_path: Path) -> None:
    files = {"memory.max": "max\n"}
    found = limits.gather_limits(roots=machine(tmp_path, cgroup="0::/\n", files=files))
    assert found.group is None
    little = limits.examine_memory(found, ring_bytes=4 * MIB)
    assert (little.severity, "available" in little.what) == (Severity.WARNING, True)


def test_this_process_s_own_limits_are_read() -> None:
    found = limits.gather_limits()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    assert found.memlock_bytes == (None if soft == resource.RLIM_INFINITY else soft)
    assert found.available_bytes is not None
    assert found.available_bytes > MIB


# --- commands of other packages ---------------------------------------------------------------------------------

PACKAGE = """
def register(app):
    def doctor() -> None:
        print("of another package")
    app.command(name="doctor")(doctor)
"""


def install(folder: Path, *, name: str = "doctor", target: str = "their_xkv_package:register") -> None:
    """As an installer does: a module, and metadata that leads to it."""
    (folder / "their_xkv_package.py").write_text(PACKAGE)
    info = folder / "their_xkv_package-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-xkv-package\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{contributed.GROUP}]\n{name} = {target}\n")


def test_a_package_s_command_takes_the_place_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path)
    with monkeypatch.context() as alone:
        alone.setattr(sys, "path", [str(tmp_path)])  # whatever else is installed here may bring a doctor, too
        theirs = contributed.found()
    assert theirs.keys() == {"doctor"}
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.main(["doctor"], theirs) == 0
    assert capsys.readouterr().out == "of another package\n"


@pytest.mark.parametrize("target", ["their_xkv_package:gone", "no_such_package_of_theirs:register"])
def test_a_broken_package_breaks_its_own_command_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    install(tmp_path, name="broken", target=target)
    monkeypatch.syspath_prepend(tmp_path)
    broken = {"broken": contributed.found()["broken"]}
    assert cli.main(["broken"], broken) == 2
    errors = capsys.readouterr().err
    assert "cannot be loaded" in errors
    assert len(errors.splitlines()) == 1
    assert cli.main(["gateway", "status", "--socket", str(tmp_path / "none.sock")], broken) == 2
    assert "no gateway answers" in capsys.readouterr().err, "which is that command's own word"


def test_huge_pages(tmp_path: Path, doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    doctor(*place(tmp_path), "--no-bandwidth")
    doctor.found("huge pages", Severity.OK if limits.gather_huge_pages() else Severity.NOTE)
    assert limits.examine_huge_pages(given=True).severity is Severity.OK
    assert "Linux 6.1" in limits.examine_huge_pages(given=False).remedy

    def refuses(fd: int, size_bytes: int) -> Mapping:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(limits, "Mapping", refuses)
    assert not limits.gather_huge_pages()
