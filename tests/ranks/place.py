"""Where a rank attaches, and with how much of a ring: what a conductor tells the rank that it starts.

Owns: the words of that, as JSON, and the attachment made of them. Must not know: processes, jobs.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ranks.objects import FRAGMENT_BYTES, SLOT_BYTES
from xkv_store.client import Attachment, Client, Role
from xkv_store.ring import RingUse


@dataclass(frozen=True, slots=True)
class Place:
    """One rank of an engine. `share`: slots of the shared region that each rank may hold.

    `end`: a file; once it is there, the rank begins no more jobs.
    """

    socket: str
    engine: str
    rank: int
    ranks: int
    share: int
    seed: int
    life: int
    end: str
    canary: bool

    @classmethod
    def of(cls, text: str) -> Place:
        """From the command line."""
        return cls(**json.loads(text))

    def text(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))

    def attach(self) -> Client:
        """As this rank; one slot for stores beside each of the share."""
        each = self.share + 2
        return Client.attach(
            Attachment(
                socket=Path(self.socket),
                engine_id=self.engine,
                role=Role.RANK,
                rank=self.rank,
                world_size=self.ranks,
                ring_bytes=self.ranks * each * SLOT_BYTES,
                load_reserve_bytes=self.ranks * self.share * SLOT_BYTES,
                staged_bytes=0,
                fragment_bytes=FRAGMENT_BYTES,
                connect_timeout_ms=20_000,
                heartbeat_timeout_ms=3_000,
                ring_use=RingUse.REPLICATED,
            )
        )
