"""How an engine reaches its gateway, or one for each rank.

Owns: from the configuration to the client's `Attachment`, embedded or by port, and each gateway's part of the ring;
`SchedulerCard`, the manager's view of its client; `StagedReads`, staging's view of it.
Must not know: vLLM, keys, jobs.
"""

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial

from xkv_compat.vllm_symbols import ConfigView
from xkv_store.client import Attachment, Client, GetObject
from xkv_store.control import NOTHING_DENIED, CountReader, DenialReader
from xkv_store.embedded import EmbeddedCard
from xkv_store.errors import UserError
from xkv_store.fragment import erase
from xkv_store.geometry import HEADER_BYTES
from xkv_store.key import ObjectKey
from xkv_store.left_out import NUMBERS, LeftOut
from xkv_store.ring import RankRegions, RingUse, regions
from xkv_store.sockets import default_socket_dir, socket_for_card, socket_for_port
from xkv_store.table import TableReader
from xkv_store.wire import LoadedObject, LoadStatus, Role

from .asked_card import NO_DENIALS
from .config import Config
from .meter import Meter, Totals
from .metrics import WORKER_COUNTERS
from .staging import Chunk, ReadDone

PUBLISHED_SECONDS_MIN = 0.5  # for the answer of a gateway whose rank has published long since, whoever came late


def ring_use(*, replicated: bool) -> RingUse:
    """How ranks use their ring: loads are leased, and where one object serves all ranks, one rank stores."""
    return RingUse.REPLICATED if replicated else RingUse.LEASED


def gateways(view: ConfigView, config: Config) -> int:
    """How many gateways the engine uses: one, or one for each rank."""
    return view.world_size if config.port_per_rank else 1


def gateway_of_rank(view: ConfigView, config: Config) -> int:
    """Which of them this rank uses; its port is so far behind `xkv.port`."""
    return view.rank if gateways(view, config) > 1 else 0


def one_gateways(view: ConfigView, config: Config) -> Config:
    """The configuration with one gateway's part of the ring: where there are several, each has a ring of its own."""
    parts = gateways(view, config)
    return replace(
        config,
        ring_bytes=config.ring_bytes // parts,
        load_reserve_bytes=config.load_reserve_bytes // parts,
        staged_bytes=config.staged_bytes // parts,
    )


def rank_region(*, view: ConfigView, config: Config, is_verified: bool, use: RingUse) -> RankRegions:
    """A rank's part of its ring; `is_verified`: hits are, before they are given.

    Raises UserError where the ring is too small for so many ranks.
    """

    def of(part: Config, ranks: int) -> RankRegions:
        return regions(
            ring_bytes=part.ring_bytes,
            slot_bytes=part.fragment_bytes + HEADER_BYTES,
            world_size=ranks,
            load_reserve_bytes=part.load_reserve_bytes,
            staged_bytes=part.staged_bytes if is_verified else 0,
            use=use,
        )[0]

    whole = of(config, view.world_size)  # whose errors speak of the key's own value
    parts = gateways(view, config)
    return whole if parts == 1 else of(one_gateways(view, config), view.world_size // parts)


def attach_rank(*, view: ConfigView, config: Config, staged_bytes: int, use: RingUse) -> Client:
    """This rank's session; `staged_bytes`: of its ring, for the scheduler. Raises UserError with what to do."""
    number = gateway_of_rank(view, config)
    return _attach(
        attachment(view=view, config=config, gateway=number, staged_bytes=staged_bytes, ring_use=use), view, config
    )


def attach_scheduler(*, view: ConfigView, config: Config) -> tuple[Client, ...]:
    """The scheduler's sessions, one with each gateway; all or none. Raises UserError with what to do."""
    with ExitStack() as unfinished:
        clients = []
        for number in range(gateways(view, config)):
            own = attachment(view=view, config=config, gateway=number, is_scheduler=True)
            clients.append(_attach(own, view, config))
            unfinished.callback(clients[-1].close)
        unfinished.pop_all()
    return tuple(clients)


def _attach(own: Attachment, view: ConfigView, config: Config) -> Client:
    try:
        return Client.attach(own)
    except UserError as error:
        if gateways(view, config) == 1:
            raise
        raise UserError(
            f"{error} (xkv.port_per_rank: {view.world_size} ranks need gateways on ports {ports_text(view, config)})"
        ) from error


def ports_text(view: ConfigView, config: Config) -> str:
    """The ports of an engine that has a gateway for each rank."""
    assert config.port is not None, "it goes with a port"
    return f"{config.port} to {config.port + view.world_size - 1}"


def await_descriptors(clients: Sequence[Client], *, world_size: int, timeout_s: float) -> list[str]:
    """What all ranks have published, each on its gateway. Raises UserError that names the ranks that are missing."""
    if len(clients) == 1:
        return [text for _, text in clients[0].await_namespaces(world_size, timeout_s).values()]
    found, missing = [], []
    deadline = time.monotonic() + timeout_s
    for rank, client in enumerate(clients):
        with suppress(UserError):  # it speaks of the gateway's only rank
            own = client.await_namespaces(1, max(deadline - time.monotonic(), PUBLISHED_SECONDS_MIN))
            found.append(own[0][1])
            continue
        missing.append(str(rank))
    if missing:
        raise UserError(
            f"no namespace from rank {', '.join(missing)} of {world_size} within {timeout_s:.1f} s; see that worker's "
            "log (with xkv.port_per_rank each attaches to a gateway of its own, on xkv.port + rank)"
        )
    return found


def attachment(
    *,
    view: ConfigView,
    config: Config,
    gateway: int = 0,
    staged_bytes: int | None = None,
    ring_use: RingUse | None = None,
    is_scheduler: bool = False,
) -> Attachment:
    """What to attach as, to which of the engine's gateways. Makes nothing.

    A scheduler gives None for what it takes from its ranks. A rank with a gateway of its own is the only one there.
    """
    part, ranks = one_gateways(view, config), view.world_size // gateways(view, config)
    socket_dir = config.socket_dir or default_socket_dir()
    card = None
    if config.path is not None:
        card = EmbeddedCard(
            folder=config.path,
            capacity_bytes=config.capacity_bytes,
            databases=config.databases,
            grace_ms=config.grace_ms,
            linger_s=config.linger_s,
            io_threads=config.io_threads,
            slot_bytes=config.fragment_bytes + HEADER_BYTES,
            remote=config.remote,
        )
        socket = socket_for_card(socket_dir, config.path)
    else:
        assert config.port is not None, "a configuration has a port or a path"
        socket = socket_for_port(socket_dir, config.port + gateway)
    return Attachment(
        socket=socket,
        engine_id=view.engine_id,
        role=Role.SCHEDULER if is_scheduler else Role.RANK,
        rank=0 if is_scheduler else view.rank % ranks,
        world_size=ranks,
        ring_bytes=part.ring_bytes,
        load_reserve_bytes=part.load_reserve_bytes,
        staged_bytes=staged_bytes,
        ring_use=ring_use,
        fragment_bytes=config.fragment_bytes,
        connect_timeout_ms=config.connect_timeout_ms,
        heartbeat_timeout_ms=config.heartbeat_timeout_ms,
        embedded=card,
        gateway_uids=frozenset() if config.gateway_uid is None else frozenset({config.gateway_uid}),
    )


class SchedulerCard:
    """The manager's attachment: `asked_card.Card` over a client."""

    def __init__(self, client: Client) -> None:
        self._client = client
        # The page is the engine's, and stays when the gateway goes.
        self._reader = DenialReader(client.control)
        self._counts = CountReader(client.control, len(WORKER_COUNTERS))
        # After a gateway's restart the scheduler may be there before ranks, which could not load.
        self.alive = client.serves
        self.touch = client.touch
        self.close = client.close

    @property
    def table(self) -> TableReader:
        """The gateway's current lookup table."""
        return self._client.table

    def denials(self) -> tuple[Sequence[tuple[int, int]], Mapping[int, int]]:
        """See asked_card.Card."""
        found = self._reader.poll()
        if found is NOTHING_DENIED:
            return NO_DENIALS
        return found.pairs, {0: self._client.table.highest_generation} if found.overflow else {}

    def store_bytes(self) -> int:
        """See asked_card.Card."""
        return self._client.control.store_bytes()

    def left_out(self, reason: LeftOut, chunks: int) -> None:
        """See asked_card.Card."""
        self._client.control.add_count(0, NUMBERS[reason], chunks)

    def worker_counts(self) -> Sequence[int]:
        """See asked_card.Card."""
        return self._counts.poll()

    def fragments(self, tag: int) -> int:
        """See asked_card.Card."""
        return self._client.table.fragments(tag)

    def loaded(self) -> Sequence[Totals]:
        """What each rank has loaded, and in how much time."""
        page = self._client.control
        return [page.loaded(rank) for rank in range(page.ranks)]


_BAD = frozenset({LoadStatus.CORRUPT, LoadStatus.FAILED, LoadStatus.TIMEOUT})  # another read would end alike


class StagedReads:
    """The staged region and the scheduler's gets: `staging.Reads` over a client."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._done: deque[ReadDone] = deque()  # appended to by the client's thread
        self._starting: list[tuple[Chunk, int]] = []
        self._meter = Meter()
        self.slots = client.load_region.count

    @property
    def free(self) -> int:
        """See staging.Reads."""
        return self._client.load_region.free

    def take(self, count: int) -> list[int] | None:
        """See staging.Reads."""
        return self._client.load_region.take(count)

    def give(self, slots: Sequence[int]) -> None:
        """See staging.Reads."""
        for slot in slots:
            erase(self._client.ring.slot(slot))
        self._client.load_region.give(slots)

    def start(self, chunk: Chunk) -> None:
        """See staging.Reads."""
        for rank in range(len(chunk.slots)):
            self.start_object(chunk, rank)

    def start_object(self, chunk: Chunk, rank: int) -> None:
        """Read one rank's object of the chunk."""
        self._starting.append((chunk, rank))
        self._meter.begin((id(chunk), rank))

    def send(self) -> None:
        """See staging.Reads. One get for all that was started since the last call."""
        if not self._starting:
            return
        places, self._starting = self._starting, []
        wanted: list[GetObject] = []
        for chunk, rank in places:
            key = ObjectKey(chunk.namespace, int.from_bytes(chunk.key[-4:], "big"), chunk.key[:-4], rank)
            wanted.append(GetObject(key=key, slots=chunk.slots[rank], first_fragment=0))
        self._client.get(wanted, partial(self._answered, places, [one.key for one in wanted]))

    def loaded(self) -> Sequence[Totals]:
        """What has been read, and in how much time."""
        return [self._meter.totals()]

    def finished(self) -> Iterable[ReadDone]:
        """See staging.Reads."""
        done = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def _answered(self, places: Sequence[tuple[Chunk, int]], keys: Sequence[ObjectKey], answer: LoadedObject) -> None:
        """On the client's thread, or within `send`."""
        chunk, number = places[answer.index]
        self._meter.moved(answer.length if answer.status == LoadStatus.OK else 0)
        self._meter.end((id(chunk), number))
        generation = answer.generation
        denied = answer.status in _BAD and generation > 0
        if answer.status == LoadStatus.MISS:
            # What the table has all the same is smaller than another rank's, and would be missed for ever.
            entry = self._client.table.lookup(keys[answer.index].tag)
            if entry is not None and entry[1] & keys[answer.index].bit:
                generation, denied = entry[0], True
        self._done.append(ReadDone(chunk, number, generation, answer.length, answer.status == LoadStatus.OK, denied))
