"""What docs/security.md says is checked: links, modes, users, names on disk, and sizes that a peer only claims."""

from __future__ import annotations

import json
import os
import stat
import threading
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from xkv_store import daemon, embedded, sockets, wire
from xkv_store.card import CardOptions
from xkv_store.card_lock import lock_folder
from xkv_store.errors import UserError
from xkv_store.gateway import Gateway, GatewayOptions
from xkv_store.geometry import DATA_OFFSET, Geometry
from xkv_store.key import ObjectKey
from xkv_store.sockets import Listener
from xkv_store.testing.cards import CardDriver
from xkv_store.testing.peer import Peer
from xkv_store.testing.processes import running_gateway
from xkv_store.verify import rebuild, verify
from xkv_store.wire import RefusedCode, Role, StoreStatus
from xkv_store.wire_tools import Purge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SLOT = 4_096
GEOMETRY = Geometry(16_384)


def options(folder: Path) -> CardOptions:
    return CardOptions(folder=folder, capacity_bytes=DATA_OFFSET + 20 * SLOT, slot_bytes=SLOT)


def key_of(number: int) -> ObjectKey:
    return ObjectKey(b"m" * 16, 0, number.to_bytes(32, "little"), 0)


@pytest.fixture
def card(tmp_path: Path) -> Path:
    """The folder of a closed card of one object."""
    driver = CardDriver(options(tmp_path / "card"))
    driver.put(key_of(1), b"x" * 100)
    driver.close()
    return tmp_path / "card"


def contents(folder: Path) -> dict[Path, bytes]:
    """Of all files, not through links. The lock names its last holder, and LMDB makes its lock file anew."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return {path: path.read_bytes() for path in files if path.name not in ("lock", "lock.mdb")}


# --- links ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lock", "making", "index", "index/data.mdb"])
@pytest.mark.parametrize("target", ["as it was", "something else", "nothing"])
def test_links_in_a_cards_folder_are_refused(card: Path, tmp_path: Path, name: str, target: str) -> None:
    """Followed, they would have us lock, read, truncate or map whatever somebody points at."""
    victim = tmp_path / "victim"
    if (card / name).exists():
        (card / name).rename(victim)
        if target != "as it was":
            victim.rename(tmp_path / "aside")
    if target == "something else":
        victim.write_bytes(b"precious")
    (card / name).symlink_to(victim)
    before = contents(tmp_path)
    there = CardOptions(folder=card, create=False)
    refused: list[Callable[[], object]] = [
        lambda: CardDriver(options(card)),
        lambda: CardDriver(there),
        lambda: list(verify(there, drop=True)),
    ]
    said = "there is no card" if name == "making" else f"{name} is a link"  # a making that did not end is no card
    for number, opening in enumerate(refused):
        with pytest.raises(UserError, match=said if number else f"{name} is a link") as error:
            opening()
        assert len(str(error.value).splitlines()) == 1
    assert contents(tmp_path) == before
    if name == "index/data.mdb":
        assert rebuild(there)["objects"] == 1, "an index is put aside with whatever is in it"
        assert contents(tmp_path).get(victim) == before.get(victim)
        return
    with pytest.raises(UserError, match=said):
        rebuild(there)
    assert contents(tmp_path) == before, "nothing was followed, and nothing made"


def test_a_database_may_be_a_link_of_ours_alone(card: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card whose databases lie elsewhere has links to them; one of another user's could lead anywhere."""
    (card / "db-0.xkv").rename(tmp_path / "elsewhere")
    (card / "db-0.xkv").symlink_to(tmp_path / "elsewhere")
    driver = CardDriver(CardOptions(folder=card, create=False))
    assert driver.get(key_of(1)) == b"x" * 100
    driver.close()
    us = os.geteuid()
    monkeypatch.setattr("xkv_store.private_files.os.geteuid", lambda: us + 7)
    if us == 0:  # root may do what it likes, so its links are no news: let this one be another's
        os.chown(card / "db-0.xkv", us + 9, -1, follow_symlinks=False)
    with pytest.raises(UserError, match="is a link that uid"):
        CardDriver(CardOptions(folder=card, create=False))


def test_a_new_database_is_not_made_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "planted").symlink_to(tmp_path / "target")
    with pytest.raises(UserError, match="leads nowhere"):
        CardDriver(
            CardOptions(
                folder=tmp_path / "card",
                capacity_bytes=DATA_OFFSET + 20 * SLOT,
                slot_bytes=SLOT,
                databases=(tmp_path / "planted",),
            )
        )
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("name", [embedded.STARTER_LOCK_NAME, embedded.LOG_NAME])
def test_links_of_an_embedded_card_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "victim").write_bytes(b"precious")
    (tmp_path / name).symlink_to(tmp_path / "victim")
    opening = embedded._open_log if name == embedded.LOG_NAME else embedded._take_starter_lock
    with pytest.raises(UserError, match="is a link"):
        opening(tmp_path)
    assert (tmp_path / "victim").read_bytes() == b"precious"


# --- modes ------------------------------------------------------------------------------------------------------


@contextmanager
def umask(mask: int) -> Iterator[None]:
    former = os.umask(mask)
    try:
        yield
    finally:
        os.umask(former)


def test_modes_do_not_depend_on_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card, runtime = tmp_path / "card", tmp_path / "run"
    with umask(0):
        driver = CardDriver(options(card))
        driver.put(key_of(1), b"x")
        driver.crash()
        driver.close()
        rebuild(CardOptions(folder=card, create=False))
        os.close(embedded._open_log(card))
        lock_fd = embedded._take_starter_lock(card)
        assert lock_fd is not None
        os.close(lock_fd)
        listener = Listener.open(runtime / "5557.sock")
        for path in (card, card / "index", card / "index.damaged", runtime):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
        files = [path for path in [*card.rglob("*"), *runtime.iterdir()] if not path.is_dir()]
        assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}, files
        assert {path.name for path in files} >= {"lock", "db-0.xkv", "data.mdb", "5557.sock", embedded.LOG_NAME}
        listener.close()
        monkeypatch.setattr("xkv_store.daemon.logging.basicConfig", lambda handlers, **_: handlers[0].close())
        (tmp_path / "other").mkdir()
        daemon._log_to(tmp_path / "other")
        assert stat.S_IMODE((tmp_path / "other" / embedded.LOG_NAME).stat().st_mode) == 0o600
        (tmp_path / "next").touch()
        assert stat.S_IMODE((tmp_path / "next").stat().st_mode) == 0o600, "so will be the log that follows that one"


def test_a_folder_that_others_can_write_is_refused(card: Path) -> None:
    for mode in (0o777, 0o720, 0o702):
        card.chmod(mode)
        with pytest.raises(UserError, match=f"mode {mode:04o}.*chmod go-w"):
            lock_folder(card, create=True)
    card.chmod(0o755)
    os.close(lock_folder(card, create=True))


# --- users ------------------------------------------------------------------------------------------------------


@contextmanager
def gateway_in_this_process(folder: Path, allow_uids: frozenset[int] = frozenset()) -> Iterator[Path]:
    socket = folder / "sockets" / "1.sock"
    card = CardOptions(folder=folder / "card", capacity_bytes=4 << 20, slot_bytes=GEOMETRY.slot_bytes)
    gateway = Gateway(GatewayOptions(socket=socket, card=card, io_threads=2, allow_uids=allow_uids))
    try:
        gateway.open()
        thread = threading.Thread(target=gateway.run)
        thread.start()
        try:
            yield socket
        finally:
            gateway.stop()
            thread.join(20)
    finally:
        gateway.close()


def test_another_user_is_refused_by_the_kernels_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the socket's mode lets in, and whatever the peer says of itself."""
    stranger = os.geteuid() + 7
    with gateway_in_this_process(tmp_path) as socket:
        monkeypatch.setattr("xkv_store.connections.sockets.peer_credentials", lambda _: sockets.Peer(1, stranger, 1))
        with closing(Peer(socket, geometry=GEOMETRY)) as peer:
            refused = peer.receive(wire.Refused)
            assert (refused.code, f"--allow-uid {stranger}" in refused.reason) == (RefusedCode.PEER, True)
            assert peer.next() is None


def test_a_user_that_was_let_in_may_use_but_not_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = os.geteuid() + 7
    with gateway_in_this_process(tmp_path, frozenset({stranger})) as socket:
        monkeypatch.setattr("xkv_store.connections.sockets.peer_credentials", lambda _: sockets.Peer(1, stranger, 1))
        for message, said in (
            (wire.Stop(1), "only the gateway's own user may stop it"),
            (wire.Verify(1, True), "only the gateway's own user may drop"),
            (Purge(1, (), ()), "only the gateway's own user may purge"),
        ):
            with closing(Peer(socket, geometry=GEOMETRY)) as peer:
                peer.hello(role=Role.TOOL)
                peer.receive(wire.Welcome)
                peer.send(message)
                assert said in peer.receive(wire.Refused).reason
        with closing(Peer(socket, geometry=GEOMETRY)) as peer:
            peer.hello(role=Role.TOOL)
            peer.receive(wire.Welcome)
            peer.send(wire.Verify(1, False))
            assert peer.receive(wire.Verifying).state is wire.VerifyState.ENDED


# --- what peers say ---------------------------------------------------------------------------------------------


def names(folder: Path) -> set[str]:
    found = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    return {name for name in found if not name.startswith("points")}


def test_names_on_disk_are_our_own(tmp_path: Path) -> None:
    """A model may be called anything; nothing that a peer says becomes part of a path."""
    hostile = ["../../etc/x", "/tmp/x", "a\0b", "x" * 10_000, ".", "", "\N{PILE OF POO}/..", "db-1.xkv"]
    with running_gateway(tmp_path, capacity="8MiB", slot_bytes=GEOMETRY.slot_bytes) as gateway:
        before = names(tmp_path)
        for number, name in enumerate(hostile):
            with closing(Peer(Path(gateway.ready["socket"]), geometry=GEOMETRY)) as peer:
                peer.attach(engine=name[:200] or "e")
                key = ObjectKey(bytes([number]) * 16, 0, name.encode()[:32] or b"h", 0)
                peer.send(wire.PublishNamespace(key.namespace, json.dumps({"model": name, name: name})))
                assert peer.put(b"x" * 100, key.encode()) is StoreStatus.CONFIRMED
                with closing(Peer(Path(gateway.ready["socket"]), geometry=GEOMETRY)) as scheduler:
                    scheduler.hello(engine=name[:200] or "e", role=Role.SCHEDULER)
                    scheduler.receive(wire.Welcome)
                    scheduler.send(wire.PublishNamespace(key.namespace, json.dumps({"model": name})))
        assert names(tmp_path) == before
        assert before == {
            "card",
            "card/lock",
            "card/db-0.xkv",
            "card/index",
            "card/index/data.mdb",
            "card/index/lock.mdb",
            "sockets",
            "sockets/5557.sock",
            "sockets/5557.sock.lock",
        }


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(status.split("VmRSS:")[1].split()[0]) << 10


def test_sizes_that_a_peer_claims_take_no_memory(tmp_path: Path) -> None:
    """Each would be terabytes if it were believed."""
    huge = 2**63 - 1
    with running_gateway(tmp_path, capacity="8MiB", slot_bytes=GEOMETRY.slot_bytes) as gateway:
        path = Path(gateway.ready["socket"])
        with closing(Peer(path, geometry=GEOMETRY)) as peer:
            peer.attach()
            before = resident_bytes(gateway.pid)
            for claims in (
                {"ring_bytes": huge},
                {"load_reserve_bytes": huge, "world_size": 4_096},
                {"staged_bytes": huge},
                {"world_size": 2**32 - 1},
                {"rank": 2**32 - 1, "world_size": 4_096},
                {"fragment_bytes": 2**32 - 1},
            ):
                with closing(Peer(Path(gateway.ready["socket"]), geometry=GEOMETRY)) as other:
                    fields: dict[str, object] = {
                        "version": wire.PROTOCOL_VERSION,
                        "engine_id": "other",
                        "role": Role.RANK,
                        "rank": 0,
                        "world_size": 1,
                        "ring_bytes": 1 << 20,
                        "load_reserve_bytes": 1 << 18,
                        "staged_bytes": 0,
                        "fragment_bytes": GEOMETRY.fragment_bytes,
                        "pid": 1,
                    }
                    other.send(wire.Hello(**(fields | claims)))  # type: ignore[arg-type]
                    other.receive(wire.Refused)
            slot = peer.welcome.store_region.first
            item = wire.PutObject(key_of(1).encode(), huge, (slot,), 1, 0, False)
            peer.send(wire.Put(1_000, (item,)))
            assert peer.receive(wire.Stored).objects[0].status is StoreStatus.INVALID
            load = peer.welcome.load_region.first
            peer.send(wire.Get(1_000, (wire.GetObject(key_of(1).encode(), (load,), 2**32 - 1),)))
            assert peer.receive(wire.Loaded).objects[0].status is wire.LoadStatus.MISS
            # An array header that announces four billion elements, in a message of a few bytes.
            with closing(Peer(Path(gateway.ready["socket"]), geometry=GEOMETRY)) as other:
                assert sockets.send(other.socket, wire.MAGIC + b"\xdd\xff\xff\xff\xff")
                assert other.receive(wire.Refused).code is RefusedCode.PROTOCOL
            with suppress(TimeoutError):
                assert peer.next(0.05) is not None, "the session goes on"
            assert resident_bytes(gateway.pid) - before < 32 << 20
