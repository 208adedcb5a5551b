"""From a prompt's tokens to the keys of its chunks, as an engine of a published identity would ask for them.

Owns: reading token ids, what of a published identity says how a prompt is cut, the keys of each chunk.
Must not know: cards, how hashes are made, why anything misses.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xkv_store.errors import UserError
from xkv_store.key import ObjectKey

FILE_BYTES_MAX = 64 << 20  # a million tokens are some seven megabytes
TOKEN_MAX = 2**31 - 1
SHOWN_CHARS_MAX = 80  # of what is no token id
_SEPARATORS = re.compile(r"[\s,]+")
FULL_KINDS = ("FullAttentionSpec", "MLAAttentionSpec")
"""Kinds of layers that a hit needs every chunk of; of others (windows, states) it needs the last ones alone."""


@dataclass(frozen=True, slots=True)
class CutGroup:
    """One KV-cache group: the tokens of its chunks, and whether a hit needs all of them, or the last alone."""

    number: int
    chunk_tokens: int
    needs_all: bool


@dataclass(frozen=True, slots=True)
class Cut:
    """How an engine cuts a prompt. `ranks`: those that have an object of each chunk."""

    tokens_per_hash: int
    hash_algorithm: str
    ranks: tuple[int, ...]
    groups: tuple[CutGroup, ...]


def read_tokens(path: Path) -> list[int]:
    """Token ids from a file: a JSON list, or numbers between spaces, commas or line ends. Raises UserError."""
    try:
        with path.open("rb") as file:
            read = file.read(FILE_BYTES_MAX + 1)
        text = read.decode("utf-8-sig").strip()
    except (OSError, ValueError) as error:
        raise UserError(f"--tokens {path}: cannot be read ({error}); type a file of token ids") from error
    if len(read) > FILE_BYTES_MAX:
        raise UserError(f"--tokens {path}: more than {FILE_BYTES_MAX >> 20} MiB; give the tokens of one prompt")
    try:
        words: list[Any] = json.loads(text) if text.startswith("[") else [int(w) for w in _SEPARATORS.split(text) if w]
    except (ValueError, RecursionError) as error:
        raise UserError(f"--tokens {path}: no token ids ({error}); a JSON list of numbers, or numbers alone") from error
    bad = [word for word in words if not isinstance(word, int) or isinstance(word, bool) or not 0 <= word <= TOKEN_MAX]
    if bad or not words:
        what = f"{repr(bad[0])[:SHOWN_CHARS_MAX]} is no token id" if bad else "it is empty"
        raise UserError(f"--tokens {path}: {what}; give the ids that the engine gets, special ones included")
    return words


def cut_of(identity: object) -> Cut:
    """What a published identity says of it. Raises UserError where that is not all there."""
    try:
        return _cut(identity)
    except (TypeError, KeyError, ValueError, IndexError, AttributeError) as error:
        raise UserError(
            "what was published of this namespace does not say how prompts are cut (it was too long to be published "
            f"whole, or another release of xkv wrote it: {type(error).__name__} {error}); ask by --key or --block-hash"
        ) from error


def _cut(identity: Any) -> Cut:
    facts = identity["facts"]
    chunk_blocks = int(facts["blocks_per_chunk"])
    groups = [
        CutGroup(int(group["id"]), int(group["tokens_per_block"]) * chunk_blocks, _needs_all(group["layers"]))
        for group in facts["groups"]
    ]
    if not groups:
        raise ValueError("no groups")
    return Cut(
        tokens_per_hash=int(facts["tokens_per_hash"]),
        hash_algorithm=str(facts["model"]["hash_algorithm"]),
        ranks=(0,) if facts["replicated"] else tuple(range(int(facts["sizes"][0]))),
        groups=tuple(groups),
    )


def _needs_all(layers: Any) -> bool:
    """Whether a group's layers are of full attention, as far as that was published: [[how many, [kind, …]], …]."""
    kinds = {run[1][0] for run in layers or () if run[1]}
    return bool(kinds) and kinds <= set(FULL_KINDS)


def places(cut: Cut, tokens: int) -> list[tuple[int, int]]:
    """(tokens up to the chunk's end, group) of the chunks that a hit of a whole prompt needs, by that end."""
    found = []
    for group in cut.groups:
        ends = range(group.chunk_tokens, tokens + 1, group.chunk_tokens)
        found += [(end, group.number) for end in (ends if group.needs_all else ends[-1:])]
    return sorted(found)


def keys_of(namespace: bytes, cut: Cut, hashes: Sequence[bytes], place: tuple[int, int]) -> list[bytes]:
    """The keys of one chunk's objects: its hash is that of its last tokens, and of all before."""
    end, group = place
    block_hash = hashes[end // cut.tokens_per_hash - 1]
    return [ObjectKey(namespace, group, block_hash, rank).encode() for rank in cut.ranks]
