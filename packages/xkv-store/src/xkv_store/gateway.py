"""The gateway: one event loop that owns all state, a pool for I/O, one thread for commits.

Owns: the loop, the order of opening and ending, the heartbeat, signals, the drain and the linger.
Must not know: formats, the index, what a session may say (`session`), who may attach (`desk`).

Sockets, finished I/O, finished commits and the wish to stop wake one selector; the loop never waits for a medium.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import resource
import selectors
import signal
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from . import __version__
from .card import Card, CardOptions, CommitBatch
from .committer import Committer
from .connections import RECEIVES_PER_ROUND_MAX, Connection
from .desk import Desk
from .errors import UserError
from .figures import Figures, Histogram, Times
from .io_pool import IO_THREADS_DEFAULT, IoPool, Lane
from .native import path_word
from .prover import Prover
from .remote_address import SCHEME
from .sockets import Listener
from .testing.points import reached
from .transfers import Transfers
from .wire import HEARTBEAT_MS, PROTOCOL_VERSION, TEXT_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from types import FrameType

    from .exporter import Exporter
    from .remote import Remote
    from .remote_address import RemoteAddress
    from .remote_alone import RemoteAlone

log = logging.getLogger(__name__)

LINGER_S_DEFAULT: Final = 60.0
DRAIN_S_MAX: Final = 10.0  # what is in flight ends within this, or is withdrawn where it has not begun
DRAIN_WITHDRAWN_S_MAX: Final = 5.0  # what has begun gets so much more; then the process ends without it
COMMIT_RETRY_NS: Final = 1_000_000_000  # after a failed commit (a full file system): no endless attempts
TICK_NS_MIN: Final = 1_000_000  # a card that always wants its tick does not make the loop spin
PROOF_NS_MIN: Final = 100_000  # nor does a proof that passes over what is gone
ACCEPTS_PER_ROUND_MAX: Final = 16  # then those who are attached have their turn
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
HEARTBEAT_NS: Final = HEARTBEAT_MS * 1_000_000
GARBAGE_THRESHOLDS: Final = (20_000, 20, 20)  # of Python's collector, which comes as it is with (700, 10, 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """How a gateway serves. `linger_s`: end so long after the last session; None: stay until told.

    `metrics`: host and port on which they are served over HTTP; None: they are not.
    """

    socket: Path
    card: CardOptions
    io_threads: int = IO_THREADS_DEFAULT
    linger_s: float | None = None
    allow_uids: frozenset[int] = frozenset()
    socket_group: str | None = None
    metrics: tuple[str, int] | None = None
    remote: RemoteAddress | None = None


class Gateway:
    """One card, one socket. `open`, then `run` until it is told to stop, then `close` (also after errors)."""

    def __init__(self, options: GatewayOptions) -> None:
        self._options = options
        self._stop_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stop_wanted = False
        self._started_s = time.monotonic()
        self._listener: Listener | None = None
        self._card: Card | None = None
        self._loop: _Loop | None = None
        self._exporter: Exporter | None = None
        self._former_handlers: dict[int, Any] = {}

    def open(self, *, card_first: bool = False) -> dict[str, Any]:
        """Take the socket and the card; returns what there is to say about them. Raises UserError, MediumError.

        `card_first`: the card's lock decides who serves (embedded), else the socket's does (a port's gateway
        that cannot have its port leaves no card behind). Clients may connect from here on.
        """
        _raise_descriptor_limit()
        try:
            self._open(card_first=card_first)
        except (OSError, MemoryError, RuntimeError) as error:  # no descriptor, no memory, no thread to be had
            raise UserError(
                f"the gateway cannot start: {str(error) or 'no memory'}; where something is lacking, raise its limit "
                "(ulimit -a: open files, memory, threads)"
            ) from error
        if threading.current_thread() is threading.main_thread():
            # From here on a signal is a wish to end well: whoever is told that it is ready may send one at once.
            self._former_handlers = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        return self.facts()

    def _open(self, *, card_first: bool) -> None:
        options = self._options
        if options.metrics is not None:
            # Not at the top: most gateways are embedded ones, and need no HTTP server.
            from .exporter import Exporter  # noqa: PLC0415

            self._exporter = Exporter(*options.metrics)
        if not card_first:
            self._listener = self._listen()
        self._card = self._open_card()
        if self._listener is None:
            self._listener = self._listen()
        self._loop = _Loop(self, options, self._listener, self._card, self._exporter, self._remote())
        if self._exporter is not None:
            self._exporter.start()

    def _open_card(self) -> Card:
        if not self._options.card.is_alone:
            return Card.open(self._options.card)
        if self._options.remote is None:
            raise UserError("a card without databases is a remote's alone: give its address, or a number of databases")
        from .card_alone import CardAlone  # noqa: PLC0415  as below

        return CardAlone.open(self._options.card)

    def _remote(self) -> Remote | RemoteAlone | None:
        if self._options.remote is None:
            return None
        assert self._card is not None
        # Not at the top: most gateways have none.
        if self._options.card.is_alone:
            from .card_alone import CardAlone  # noqa: PLC0415
            from .remote_alone import RemoteAlone  # noqa: PLC0415

            assert isinstance(self._card, CardAlone)
            return RemoteAlone(self._card, self._options.remote)
        from .remote import Remote  # noqa: PLC0415

        return Remote(self._card, self._options.remote)

    def _listen(self) -> Listener:
        options = self._options
        return Listener.open(options.socket, group=options.socket_group, shared=bool(options.allow_uids))

    def run(self) -> None:
        """Serve until `stop`, a signal, a tool's Stop or the linger; then finish what is in flight."""
        assert self._loop is not None, "open() comes first"
        self._loop.run(self._stop_fd)

    def stop(self) -> None:
        """Drain and end. Any thread, or a signal handler, may call this."""
        self._stop_wanted = True
        os.eventfd_write(self._stop_fd, 1)

    @property
    def stop_wanted(self) -> bool:
        """Whether somebody wants the end."""
        return self._stop_wanted

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        log.info("signal %s: draining", signal.Signals(number).name)
        self.stop()

    def facts(self) -> dict[str, Any]:
        """What does not change in this life, and the card."""
        assert self._card is not None
        card = self._card.status()
        return {
            "socket": str(self._options.socket),
            "card": self._card_name(),
            "pid": os.getpid(),
            "version": __version__,
            "protocol": PROTOCOL_VERSION,
            "direct": all(database["direct"] for database in card["databases"]),
            "checksums": path_word(),
            "metrics": self._exporter.url if self._exporter is not None else None,
            **card,
        }

    def _card_name(self) -> str:
        options = self._options
        if options.card.is_alone and options.remote is not None:
            return f"{SCHEME}://{options.remote.master}"
        return str(options.card.folder.absolute())

    def status_text(self) -> str:
        """JSON: card, counters, sessions, versions; fits a message."""
        return fitting_json(self._status(), ("sessions", "databases", "namespaces"))

    def _status(self) -> dict[str, Any]:
        assert self._loop is not None
        status = self.facts()
        status["uptime_s"] = round(time.monotonic() - self._started_s, 1)
        desk = self._loop.status()
        return status | {**desk, "counters": {**status["counters"], **desk["counters"]}}

    def figures(self) -> Figures:
        """A snapshot for the exporter."""
        assert self._loop is not None
        return self._loop.figures(self._status())

    def close(self) -> None:
        """Close the card, then give the socket up. Idempotent; also after an `open` that failed."""
        loop, self._loop = self._loop, None
        card, self._card = self._card, None
        listener, self._listener = self._listener, None
        exporter, self._exporter = self._exporter, None
        try:
            if exporter is not None:
                exporter.close()
            quiet = loop.close() if loop is not None else True
            if card is not None and quiet:
                card.close()  # where a thread hangs in the card, the next start recovers as after a kill
        finally:
            if listener is not None:
                listener.close()
        while self._former_handlers:
            signal.signal(*self._former_handlers.popitem())
        if self._stop_fd >= 0:
            os.close(self._stop_fd)
            self._stop_fd = -1


def spare_garbage_collection() -> None:
    """For a process that is a gateway, once it is open: what there is now stays, and what comes makes no cycles.

    Python's own pace would look at each object in limbo over and over.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GARBAGE_THRESHOLDS)


class _Loop:
    """The event loop of an open gateway."""

    def __init__(  # noqa: PLR0917  made in one place, of what the gateway has opened
        self,
        gateway: Gateway,
        options: GatewayOptions,
        listener: Listener,
        card: Card,
        exporter: Exporter | None,
        remote: Remote | RemoteAlone | None,
    ) -> None:
        self._gateway = gateway
        self._remote = remote
        self._linger_s = options.linger_s
        self._listener = listener
        self._card = card
        self._pool = IoPool(options.io_threads)
        self._committer: Committer[CommitBatch] = Committer(self._commit)
        self._prover = Prover(card, self._pool)
        nearby = remote.nearby if remote is not None else None
        alone = remote.alone if remote is not None else None
        self._transfers = Transfers(card, self._pool, self._prover.noticed, nearby, alone)
        self._desk = Desk(
            card=card,
            transfers=self._transfers,
            prover=self._prover,
            allow_uids=options.allow_uids,
            boot_id=card.boot_id,
            house=gateway,
            remote=remote,
            needs_staging=options.card.is_alone,
        )
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener.socket, selectors.EVENT_READ, listener)
        self._selector.register(self._pool, selectors.EVENT_READ, self._pool)
        self._selector.register(self._committer, selectors.EVENT_READ, self._committer)
        for file in remote.files if remote is not None else ():
            self._selector.register(file, selectors.EVENT_READ, file)
        self._exporter = exporter
        if exporter is not None:
            self._selector.register(exporter, selectors.EVENT_READ, exporter)
        self._times = {Lane.LOAD: Histogram(), Lane.STORE: Histogram(), Lane.PROOF: Histogram()}
        self._listening = True
        self._next_beat_ns = 0
        self._commit_after_ns = 0
        self._next_tick_ns = 0
        self._next_proof_ns = 0
        self._drain_since_s: float | None = None
        self._withdrawn = False
        self._empty_since_s = time.monotonic()

    def run(self, stop_fd: int) -> None:
        """Rounds until the drain is over."""
        self._selector.register(stop_fd, selectors.EVENT_READ, None)
        try:
            while not self._drained():
                self._round()
        finally:
            self._selector.unregister(stop_fd)

    def status(self) -> dict[str, Any]:
        """The desk's view."""
        status = {**self._desk.status(), "draining": self._desk.draining}
        if self._remote is not None:
            status["remote"] = self._remote.status()
            status["counters"] |= self._remote.counters()
        return status

    def figures(self, status: Mapping[str, Any]) -> Figures:
        """A snapshot, with what a status does not say."""
        queued = {"turn": self._transfers.queued}
        queued |= {lane.value: self._pool.queued(lane) for lane in Lane}
        return Figures(
            status=status,
            roles=self._desk.roles(),
            queued=queued,
            in_flight=self._transfers.in_flight,
            uptime_s=status["uptime_s"],
            times={lane.value: Times(times.cumulated(), times.sum_s) for lane, times in self._times.items()},
        )

    def close(self) -> bool:
        """End the threads; False when one hangs in an I/O call and the card must be left as it is."""
        committed = self._committer.close()
        moved = self._pool.close()
        if self._remote is not None:
            moved = self._remote.close() and moved
        if committed and moved:
            self._desk.close()
        else:
            log.error("an I/O call does not return; ending without it")
        self._selector.close()
        return committed and moved

    # --- one round ---------------------------------------------------------------------------------------

    def _round(self) -> None:
        events = self._selector.select(self._timeout_s())
        for key, mask in events:
            if isinstance(key.data, Connection):
                self._desk.touched.add(key.data)
                if mask & selectors.EVENT_READ:
                    self._desk.readable(key.data, RECEIVES_PER_ROUND_MAX)
            elif key.data is self._listener:
                self._accept()
            elif key.data is self._exporter and self._exporter is not None:
                self._exporter.give(self._gateway.figures)
            elif key.data is None:
                os.eventfd_read(key.fd)  # somebody wants the end; looked at below
        for job in self._pool.finished_jobs():
            self._times[job.lane].add(job.took_s)
            (self._prover if job.lane is Lane.PROOF else self._transfers).ended(job)
        self._commits()
        now_ns = time.monotonic_ns()
        self._transfers.begin(now_ns)
        if self._remote is not None:
            self._remote.step(now_ns)
        beating = now_ns >= self._next_beat_ns
        if beating:
            self._beat(now_ns)
        if now_ns >= self._next_tick_ns:
            self._end_if_deleted()
            wish_ns = self._card.tick(now_ns)
            self._next_tick_ns = now_ns + min(max(wish_ns or HEARTBEAT_NS, TICK_NS_MIN), HEARTBEAT_NS)
        self._prove(now_ns)
        self._begin_commit(now_ns)
        for connection in self._desk.end_round(everybody=beating):
            self._watch(connection)
        self._end_when_wanted()

    def _prove(self, now_ns: int) -> None:
        wish_ns = self._prover.step(now_ns)
        self._next_proof_ns = now_ns + (HEARTBEAT_NS if wish_ns is None else max(wish_ns, PROOF_NS_MIN))

    def _timeout_s(self) -> float:
        """Until the next beat, tick of the card or piece of a proof; 0 where somebody waits for his turn."""
        if self._transfers.waiting:
            return 0.0
        next_ns = min(self._next_beat_ns, self._next_tick_ns, self._next_proof_ns)
        return max(0.0, (next_ns - time.monotonic_ns()) / 1e9)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_ROUND_MAX):
            try:
                accepted = self._listener.accept()
            except OSError as error:
                # No descriptors, no memory: those who wait are taken up at a later beat.
                log.warning("cannot accept a connection: %s", error.strerror)
                self._selector.unregister(self._listener.socket)
                self._listening = False
                return
            if accepted is None:
                return
            self._desk.accept(accepted)

    def _beat(self, now_ns: int) -> None:
        self._next_beat_ns = now_ns + HEARTBEAT_NS
        self._desk.engines.beat(now_ns)
        if not self._listening:
            self._selector.register(self._listener.socket, selectors.EVENT_READ, self._listener)
            self._listening = True

    def _watch(self, connection: Connection) -> None:
        """Tell the selector what matters now of a connection, or close it."""
        over = connection.may_close(time.monotonic())
        wanted = 0 if over else connection.wants
        if wanted != connection.interest:
            if not connection.interest:
                self._selector.register(connection.socket, wanted, connection)
            elif not wanted:
                self._selector.unregister(connection.socket)
            else:
                self._selector.modify(connection.socket, wanted, connection)
            connection.interest = wanted
        if over:
            self._desk.forget(connection)

    # --- commits -----------------------------------------------------------------------------------------

    def _commit(self, batch: CommitBatch) -> None:
        """On the committer's thread."""
        reached("put.before_commit")
        self._card.commit_batch(batch)
        reached("put.committed")

    def _commits(self) -> None:
        ended = self._committer.ended()
        if ended is None:
            return
        batch, error = ended
        if error is None:
            plans = self._card.confirmed(batch)
            self._transfers.confirmed(plans)
            if self._remote is not None:
                self._remote.confirmed(plans)
            return
        log.error("the index was not committed: %s", error)
        self._commit_after_ns = time.monotonic_ns() + COMMIT_RETRY_NS
        plans = self._card.commit_failed(batch)
        self._transfers.commit_failed(plans)
        if self._remote is not None:
            self._remote.commit_failed(plans)

    def _begin_commit(self, now_ns: int) -> None:
        if self._committer.idle and now_ns >= self._commit_after_ns:
            batch = self._card.take_commit_batch()
            if batch is not None:
                self._committer.begin(batch)

    # --- the end -----------------------------------------------------------------------------------------

    def _end_when_wanted(self) -> None:
        now_s = time.monotonic()
        if self._desk.sessions or self._prover.running:
            self._empty_since_s = now_s
        elif self._linger_s is not None and now_s - self._empty_since_s >= self._linger_s:
            self._gateway.stop()
        if self._gateway.stop_wanted and self._drain_since_s is None:
            self._drain_since_s = now_s
            self._next_beat_ns = 0
            self._desk.drain()
            if self._remote is not None:
                self._remote.drain()

    def _end_if_deleted(self) -> None:
        if not self._gateway.stop_wanted and self._card.deleted:
            log.error("the card's folder was deleted: nothing is confirmed any more, ending")
            self._gateway.stop()

    def _drained(self) -> bool:
        """Whether nothing is in flight any more, or the bound of waiting for it is over."""
        if self._drain_since_s is None:
            return False
        waited_s = time.monotonic() - self._drain_since_s
        if waited_s > DRAIN_S_MAX and not self._withdrawn:
            self._withdrawn = True
            self._transfers.withdraw_all()
        if waited_s > DRAIN_S_MAX + DRAIN_WITHDRAWN_S_MAX:
            log.error("%d objects still in flight; ending without them", self._transfers.in_flight)
            return True
        in_flight = self._transfers.in_flight + (self._remote.in_flight if self._remote is not None else 0)
        return not in_flight and self._committer.idle and not self._desk.connections


def fitting_json(status: dict[str, Any], lists: Sequence[str]) -> str:
    """The status as JSON that a message holds: `lists` in it are shortened, and say by how much."""
    status = dict(status)
    while len(text := json.dumps(status)) > TEXT_BYTES_MAX:
        name = max(lists, key=lambda name: len(json.dumps(status[name])))
        entries = status[name]
        assert entries, "what a status says beside its lists fits a message"
        kept = entries[: len(entries) // 2]
        status[name] = kept
        status[f"{name}_left_out"] = status.get(f"{name}_left_out", 0) + len(entries) - len(kept)
    return text


def _raise_descriptor_limit() -> None:
    """Sessions and rings cost descriptors, and the customary soft limit of 1,024 is for programs with select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
