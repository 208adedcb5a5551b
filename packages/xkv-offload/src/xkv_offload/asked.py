"""How often chunks were asked for, about, in bounded memory: for `xkv.store_threshold`.

Owns: the counts and how they fade. Pure. Must not know: what is done with a count, vLLM, the card.

A count-min sketch (Cormode and Muthukrishnan, 2005) with conservative update, that is halved now and then as in
TinyLFU (Einziger, Friedman and Manes, 2017). Counts are never too low between two halvings; one in some twenty is too
high at the end of such a time, one in fifty over all of it.
"""

from typing import Final

import xxhash

CELLS_BITS: Final = 22  # 4 MiB of one byte each, allocated only where a threshold is set
COUNT_MAX: Final = 255
ASKS_PER_HALVING: Final = 1 << 19  # then a fifth of the cells is not 0: chunks of 2 MiB make that a terabyte

_MASK = (1 << CELLS_BITS) - 1
_HALVES = bytes(count // 2 for count in range(COUNT_MAX + 1))


class AskCounts:
    """Of one engine."""

    def __init__(self) -> None:
        self._cells = bytearray(1 << CELLS_BITS)
        self._asks = 0

    def ask(self, key: bytes) -> int:
        """Once more; how often that is by now, at most COUNT_MAX."""
        mixed = xxhash.xxh3_64_intdigest(key)
        first, second = mixed & _MASK, mixed >> 64 - CELLS_BITS
        cells = self._cells
        count = min(min(cells[first], cells[second]) + 1, COUNT_MAX)
        cells[first] = max(cells[first], count)
        cells[second] = max(cells[second], count)
        self._asks += 1
        if self._asks >= ASKS_PER_HALVING:
            self._cells = self._cells.translate(_HALVES)
            self._asks = 0
        return count
