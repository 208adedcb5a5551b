"""The engines' rings that the process of a remote's library reaches, so that it puts from them and loads into them.

Owns: which rings it was told of, under which numbers, in which of its lives; that it forgets those of engines that have
ended. Must not know: objects, sessions, calls for objects. Event loop's thread alone.

A ring that is not there yet, or cannot be registered, is none: its objects go by the transfer memory.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from .remote_words import TRANSFER, Lane

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .remote_link import Process
    from .ring import Ring

log = logging.getLogger(__name__)

LOST_MAX: Final = 3  # a ring that takes too long ends the process, and with it what others have there
_NO_KEY: Final = ("ring",)  # a call has a key, and this one names nothing at the remote


@dataclass(slots=True, eq=False)
class _Known:
    """`asked`, `there`: the life of the process in which it was told of the ring, and in which it has it; 0: none.

    `lost`: how many lives in a row have ended before it was there.
    """

    ring: Ring
    number: int
    asked: int = 0
    there: int = 0
    lost: int = 0


class RemoteRings:
    """Of one process. `step` it each round."""

    def __init__(self, link: Process) -> None:
        self._link = link
        self._known: dict[Ring, _Known] = {}
        self._numbers = TRANSFER

    def number_of(self, ring: Ring) -> int | None:
        """What the process knows this ring as, just now. A ring that is new here is told to it."""
        known = self._known.get(ring)
        if known is None:
            self._numbers += 1
            known = self._known[ring] = _Known(ring, self._numbers)
            self.step()
        return known.number if known.there == self._link.life and self._link.is_up else None

    def __len__(self) -> int:
        """How many rings the process has."""
        return sum(known.there == self._link.life for known in self._known.values()) if self._link.is_up else 0

    def step(self) -> None:
        """Tell the process of rings that it does not know, and of those that are no more."""
        ended = [known for known in self._known.values() if known.ring.fd < 0]
        for known in ended:
            if known.asked == self._link.life and self._link.is_up:
                if not self._link.has_room(Lane.MAP):
                    return
                self._link.call(Lane.MAP, _NO_KEY, _nobody, offsets=(known.number,), sizes=(0,), remove=True)
            del self._known[known.ring]
        for known in self._known.values():
            if known.asked != self._link.life and known.lost < LOST_MAX and self._link.has_room(Lane.MAP):
                known.asked = self._link.life
                size = known.ring.slots * known.ring.slot_bytes
                told = partial(self._told, known, known.asked)
                self._link.call(Lane.MAP, _NO_KEY, told, (known.ring.fd,), offsets=(known.number,), sizes=(size,))

    def _told(self, known: _Known, life: int, codes: Sequence[int] | None) -> None:
        if codes == (0,):
            known.there, known.lost = life, 0
        elif codes is None:
            known.lost += 1
            if known.lost == LOST_MAX:
                log.warning("a ring is not registered with the remote's library in time: its bytes are copied")
        else:
            log.warning("a ring cannot be registered with the remote's library (code %d): its bytes are copied", *codes)


def _nobody(_codes: Sequence[int] | None) -> None:
    pass
