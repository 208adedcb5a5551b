"""Two identities, field by field: what makes one engine's namespace another than a second one's.

Owns: the comparison of what was published of namespaces, the words for its fields, and their order.
Must not know: how an identity comes about, cards, commands.

What is published is JSON (docs/identity.md). A field that nobody has a word for is named by its path.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

TEXT_CHARS_MAX: Final = 120  # of a value that is shown
DIFFERENCES_MAX: Final = 256  # two model configs may differ in every line: more tell nobody more
DEPTH_MAX: Final = 32  # deeper than any identity; what is below is compared as a whole

# Beginning of a path → the field in words, and what to look at; causes before what follows from them.
_WORDS: Final = (
    ("salt", "namespace word", "xkv.namespace"),
    ("facts.model.model", "model", "the model that is served"),
    ("facts.model.revision", "model's revision", "--revision"),
    ("weights", "weights", "the model's files, or xkv.weights_fingerprint"),
    ("facts.vllm", "vLLM's version", "which vLLM is installed"),
    ("facts.sizes[0]", "tensor parallel size", "--tensor-parallel-size"),
    ("facts.sizes[1]", "pipeline parallel size", "--pipeline-parallel-size"),
    ("facts.sizes", "context parallel sizes", "the parallel sizes"),
    ("facts.replicated", "layout of ranks", "xkv.tp_layout, xkv.port_per_rank"),
    ("facts.cache_dtype", "KV dtype", "--kv-cache-dtype"),
    ("facts.model.cache_dtype", "KV dtype", "--kv-cache-dtype"),
    ("facts.model.dtype", "dtype", "--dtype"),
    ("facts.model.quantization", "quantisation", "--quantization"),
    ("facts.model.load_format", "load format", "--load-format"),
    ("facts.blocks_per_chunk", "blocks per chunk", "blocks_per_chunk (or block_size) of the KV transfer config"),
    ("facts.tokens_per_hash", "tokens per hash", "--block-size"),
    ("facts.model.hash_algorithm", "hash algorithm", "--prefix-caching-hash-algo"),
    ("facts.tagged_hashes", "form of hashes", "which vLLM is installed"),
    ("facts.model.speculative", "drafting model", "--speculative-config"),
    ("facts.model.hf_config", "model's configuration", "config.json, --hf-overrides"),
    ("facts.kv_cache_layout", "layout of KV pages", "VLLM_KV_CACHE_LAYOUT"),
    ("launch", "launch", "why the identity was in doubt: the engine's log says it (PYTHONHASHSEED, LoRA, weights)"),
    ("facts.groups", "KV-cache groups", "block size, dtype, attention: what else differs"),
    ("facts.model", "model", "the model that is served"),
    ("format", "identity format", "which xkv is installed"),
)


_ABSENT: Final = object()


@dataclass(frozen=True, slots=True)
class Difference:
    """One field: its path, and its value on either side, as short text; "-" where it is not there."""

    path: str
    here: str
    there: str

    @property
    def place(self) -> int:
        """Among all fields: causes first."""
        return next((at for at, (front, *_) in enumerate(_WORDS) if self.path.startswith(front)), len(_WORDS))

    @property
    def words(self) -> str:
        """The field, for people."""
        return _WORDS[self.place][1] if self.place < len(_WORDS) else self.path

    @property
    def look_at(self) -> str:
        """Where it is set."""
        return _WORDS[self.place][2] if self.place < len(_WORDS) else "what differs between the two launches"

    def as_value(self) -> dict[str, str]:
        """For JSON."""
        return {"field": self.path, "words": self.words, "here": self.here, "there": self.there}


def parsed(descriptor: str) -> object | None:
    """What was published; None where nothing was, or it cannot be read."""
    try:
        return json.loads(descriptor) if descriptor else None
    except (ValueError, RecursionError):
        return None


def differences(here: object, there: object) -> list[Difference]:
    """The fields in which two published identities differ, causes before what follows from them."""
    found: list[Difference] = []
    _compare("", here, there, found, DEPTH_MAX)
    return sorted(found, key=lambda one: (one.place, one.path))


def in_words(found: Sequence[Difference]) -> list[str]:
    """Each field once, with its values where they are short: "KV dtype (fp8 here, auto there)"."""
    told: dict[str, str] = {}
    for one in found:
        told.setdefault(one.words, f"{one.words} ({one.here} here, {one.there} there)")
    return list(told.values())


def look_at(found: Sequence[Difference]) -> str:
    """Where the first of them is set: the others may follow from it."""
    return found[0].look_at if found else ""


def printable(text: str) -> str:
    """What somebody else has published, so that a terminal shows it and does nothing else."""
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text)


def shortened(value: object) -> str:
    """A value as text, of a bounded length."""
    if value is _ABSENT:
        return "-"
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    text = printable(text) or '""'
    return text if len(text) <= TEXT_CHARS_MAX else f"{text[: TEXT_CHARS_MAX - 1]}…"


def _compare(path: str, here: object, there: object, found: list[Difference], depth: int) -> None:
    if len(found) >= DIFFERENCES_MAX or here == there:
        return
    if depth and isinstance(here, Mapping) and isinstance(there, Mapping):
        for name in sorted(here.keys() | there.keys(), key=str):
            below = f"{path}.{name}" if path else str(name)
            _compare(below, here.get(name, _ABSENT), there.get(name, _ABSENT), found, depth - 1)
    elif depth and isinstance(here, list) and isinstance(there, list) and len(here) == len(there):
        for number, (one, other) in enumerate(zip(here, there, strict=True)):
            _compare(f"{path}[{number}]", one, other, found, depth - 1)
    else:
        found.append(Difference(path, shortened(here), shortened(there)))
