"""What an engine's configuration says of its identity, before the engine has run.

Owns: which fields of an identity the options and `--kv-transfer-config` determine, and comparing just these.
Must not know: cards, hashes. The rest of an identity only an engine knows, which has loaded its model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xkv_store.identities import Difference, shortened

from ..config import Config  # noqa: TID252  the package may have another name
from ..doctor.transfer_config import blocks_per_chunk_of  # noqa: TID252
from ..weights import weights_fingerprint  # noqa: TID252

UNKNOWN = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What was said of an engine; None: not said. `model`: as it is given to vLLM. `cache_dtype`: its option."""

    model: str | None = None
    ranks: int | None = None
    cache_dtype: str | None = None
    block_tokens: int | None = None
    hash_algorithm: str | None = None
    vllm: str | None = None
    extra: Mapping[str, Any] | None = None
    config: Config | None = None


def expected(launch: Launch) -> dict[str, object]:
    """Path of a field → its value, of all that is determined. Raises UserError for a chunk that is none."""
    found: dict[str, object] = {
        "facts.model.model": launch.model,
        "facts.sizes[0]": launch.ranks,
        "facts.model.cache_dtype": launch.cache_dtype,
        "facts.model.hash_algorithm": launch.hash_algorithm,
        "facts.vllm": launch.vllm,
        "facts.groups[0].tokens_per_block": launch.block_tokens,
    }
    if launch.extra is not None and (launch.block_tokens is not None or "block_size" not in launch.extra):
        found["facts.blocks_per_chunk"] = blocks_per_chunk_of(launch.extra, block_tokens=launch.block_tokens or 1)
    if launch.config is not None:
        found["salt"] = launch.config.namespace
    found["weights"] = _weights(launch)
    return {path: value for path, value in found.items() if value is not None}


def _weights(launch: Launch) -> str | None:
    if launch.config is not None and launch.config.weights_fingerprint != "auto":
        return f"given:{launch.config.weights_fingerprint}"
    return None if launch.model is None else weights_fingerprint(launch.model, None, "auto")


def compared(wanted: Mapping[str, object], identity: object) -> list[Difference]:
    """The fields in which a published identity is other than expected; what it does not say differs in nothing.

    One that is its launch's own differs in that: no configuration leads to it again.
    """
    found = []
    for path, value in {**wanted, "launch": ""}.items():
        there = _dug(identity, path)
        if there is not UNKNOWN and there != value:
            found.append(Difference(path, shortened(value), shortened(there)))
    return sorted(found, key=lambda one: (one.place, one.path))


def _dug(value: Any, path: str) -> Any:
    for name in path.replace("[", ".").replace("]", "").split("."):
        if isinstance(value, Mapping):
            value = value.get(name, UNKNOWN)
        elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            return UNKNOWN
    return value
