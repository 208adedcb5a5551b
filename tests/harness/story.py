"""What the stand-in model computes: a request's tokens, and the bytes of its KV rows.

Owns: the pure function from (layer, rank, tokens up to a position) to the bytes of that position's row, and from a
prefix to the next token. Equal prefixes give equal bytes in every process; any other prefix, layer or rank gives
other bytes.
Must not know: vLLM, blocks, where rows lie.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]

FIRST_TOKEN = 10  # lower ids stand for special tokens in many models
VOCABULARY = 1000
_MASK = (1 << 64) - 1


def _mixed(value: int) -> int:
    """splitmix64's finaliser (Steele, Lea and Flood, 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _mixed_words(words: Words) -> Words:
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    last: Words = words ^ (words >> np.uint64(31))
    return last


def prompt(*, tokens: int, seed: int, after: Sequence[int] = ()) -> list[int]:
    """`tokens` token ids without a pattern, beginning with `after`."""
    ids = list(after)
    ids += [FIRST_TOKEN + _mixed(seed * 1_000_003 + number) % VOCABULARY for number in range(len(ids), tokens)]
    return ids


class Story:
    """One request: its prompt, and every token that the model will say after it."""

    def __init__(self, prompt_tokens: Sequence[int]) -> None:
        self.prompt_length = len(prompt_tokens)
        self._tokens = list(prompt_tokens)
        self._prefixes: list[int] = []

    def _reach(self, length: int) -> None:
        """Know the first `length` tokens and the digests of their prefixes."""
        while len(self._prefixes) < length:
            position = len(self._prefixes)
            if position == len(self._tokens):
                self._tokens.append(FIRST_TOKEN + self._prefixes[-1] % VOCABULARY)
            before = self._prefixes[-1] if position else 0
            self._prefixes.append(_mixed(before ^ (self._tokens[position] * 0x100000001B3)))

    def tokens(self, start: int, end: int) -> list[int]:
        """The tokens at positions `start` to `end` - 1."""
        self._reach(end)
        return self._tokens[start:end]

    def rows(self, *, layer: str, rank: int, start: int, end: int, row_bytes: int) -> Bytes:
        """The KV rows of positions `start` to `end` - 1, of shape (positions, row_bytes)."""
        self._reach(end)
        salt = np.uint64(_mixed(zlib.crc32(layer.encode()) | rank << 32))
        prefixes: Words = np.array(self._prefixes[start:end], dtype=np.uint64)
        columns: Words = np.arange(-(-row_bytes // 8), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        words = _mixed_words((prefixes ^ salt)[:, None] + columns[None, :])
        return np.ascontiguousarray(words).view(np.uint8)[:, :row_bytes]
