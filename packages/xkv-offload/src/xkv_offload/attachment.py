"""How an engine reaches its gateway.

Owns: from the configuration to the client's `Attachment`, embedded or by port; `SchedulerCard`, the manager's view
of its client.
Must not know: vLLM, keys, jobs.
"""

from collections.abc import Sequence

from xkv_compat.vllm_symbols import ConfigView
from xkv_store.client import Attachment, Client
from xkv_store.control import ControlPage, DenialReader
from xkv_store.embedded import EmbeddedCard
from xkv_store.geometry import HEADER_BYTES
from xkv_store.sockets import default_socket_dir, socket_for_card, socket_for_port
from xkv_store.table import TableReader
from xkv_store.wire import Role

from .config import Config


def attachment(*, view: ConfigView, config: Config, is_scheduler: bool) -> Attachment:
    """What to attach as. Makes nothing."""
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
        fragment_bytes=config.fragment_bytes,
        connect_timeout_ms=config.connect_timeout_ms,
        heartbeat_timeout_ms=config.heartbeat_timeout_ms,
        embedded=card,
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
