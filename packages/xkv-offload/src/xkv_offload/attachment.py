"""How an engine reaches its gateway.

Owns: from the configuration to the client's `Attachment`, embedded or by port; `SchedulerCard`, the manager's view
of its client; `StagedReads`, staging's view of it.
Must not know: vLLM, keys, jobs.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial

from xkv_compat.vllm_symbols import ConfigView
from xkv_store.client import Attachment, Client, GetObject
from xkv_store.control import ControlPage, DenialReader
from xkv_store.embedded import EmbeddedCard
from xkv_store.fragment import erase
from xkv_store.geometry import HEADER_BYTES
from xkv_store.key import ObjectKey
from xkv_store.sockets import default_socket_dir, socket_for_card, socket_for_port
from xkv_store.table import TableReader
from xkv_store.wire import LoadedObject, LoadStatus, Role

from .config import Config
from .staging import Chunk, ReadDone


def attachment(*, view: ConfigView, config: Config, staged_bytes: int | None, is_scheduler: bool) -> Attachment:
    """What to attach as. Makes nothing. `staged_bytes`: None for a scheduler, which takes what its ranks have said."""
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
        )
        socket = socket_for_card(socket_dir, config.path)
    else:
        assert config.port is not None, "a configuration has a port or a path"
        socket = socket_for_port(socket_dir, config.port)
    return Attachment(
        socket=socket,
        engine_id=view.engine_id,
        role=Role.SCHEDULER if is_scheduler else Role.RANK,
        rank=0 if is_scheduler else view.rank,
        world_size=view.world_size,
        ring_bytes=config.ring_bytes,
        load_reserve_bytes=config.load_reserve_bytes,
        staged_bytes=staged_bytes,
        fragment_bytes=config.fragment_bytes,
        connect_timeout_ms=config.connect_timeout_ms,
        heartbeat_timeout_ms=config.heartbeat_timeout_ms,
        embedded=card,
        gateway_uids=frozenset() if config.gateway_uid is None else frozenset({config.gateway_uid}),
    )


class SchedulerCard:
    """The manager's attachment: `manager.Card` over a client."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._page: ControlPage = client.control
        self._reader = DenialReader(self._page)
        self.alive = client.alive
        self.touch = client.touch
        self.close = client.close

    @property
    def table(self) -> TableReader:
        """The gateway's current lookup table."""
        return self._client.table

    def denials(self) -> tuple[Sequence[tuple[int, int]], bool]:
        """See manager.Card."""
        if self._client.control is not self._page:
            self._page = self._client.control
            self._reader = DenialReader(self._page)
        found = self._reader.poll()
        return found.pairs, found.overflow

    def store_bytes(self) -> int:
        """See manager.Card."""
        return self._client.control.store_bytes()

    def fragments(self, tag: int) -> int:
        """See manager.Card."""
        return self._client.table.fragments(tag)


_BAD = frozenset({LoadStatus.CORRUPT, LoadStatus.FAILED, LoadStatus.TIMEOUT})  # another read would end alike


class StagedReads:
    """The staged region and the scheduler's gets: `staging.Reads` over a client."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._done: deque[ReadDone] = deque()  # appended to by the client's thread
        self._starting: list[Chunk] = []
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
        self._starting.append(chunk)

    def send(self) -> None:
        """See staging.Reads. One get for all that was started since the last call."""
        if not self._starting:
            return
        places: list[tuple[Chunk, int]] = []
        wanted: list[GetObject] = []
        for chunk in self._starting:
            group, block_hash = int.from_bytes(chunk.key[-4:], "big"), chunk.key[:-4]
            for rank, slots in enumerate(chunk.slots):
                key = ObjectKey(chunk.namespace, group, block_hash, rank)
                wanted.append(GetObject(key=key, slots=slots, first_fragment=0))
                places.append((chunk, rank))
        self._starting = []
        self._client.get(wanted, partial(self._answered, places))

    def finished(self) -> Iterable[ReadDone]:
        """See staging.Reads."""
        done = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def _answered(self, places: Sequence[tuple[Chunk, int]], answer: LoadedObject) -> None:
        """On the client's thread, or within `send`."""
        chunk, number = places[answer.index]
        ok = answer.status == LoadStatus.OK
        denied = answer.status in _BAD and answer.generation > 0
        self._done.append(ReadDone(chunk, number, answer.generation, answer.length, ok, denied))
