"""The block hashes that this vLLM gives a prompt, by its own functions.

Owns: asking vLLM for them under a given seed, and saying what is missing where it cannot be asked.
Must not know: chunks, groups, keys, what the hashes are looked up in.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .errors import UnsupportedVLLM
from .features import installed_version
from .live import import_module

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["SEED_VARIABLE", "request_block_hashes"]

SEED_VARIABLE = "PYTHONHASHSEED"

_CACHE = "vllm.v1.core.kv_cache_utils"
_PLACES = {
    "get_hash_fn_by_name": "vllm.utils.hashing",
    "init_none_hash": _CACHE,
    "get_request_block_hasher": _CACHE,
    "Request": "vllm.v1.request",
    "SamplingParams": "vllm.sampling_params",
}


def request_block_hashes(
    tokens: Sequence[int],
    *,
    tokens_per_hash: int,
    hash_algorithm: str,
    seed: str | None,
    salt: str | None = None,
) -> list[bytes]:
    """The hashes of every whole ``tokens_per_hash`` tokens, as an engine makes them for a request of plain text.

    ``seed``: what PYTHONHASHSEED says there, None where it is not set (then some hashes are random in each
    process: ``none_hash_is_stable``). The environment and vLLM's root hash are changed meanwhile: not for an
    engine's process. Raises UnsupportedVLLM that lists what this vLLM lacks, ValueError for an algorithm that
    it does not know, BrokenVLLM where an import fails.
    """
    names = _names()
    function = names["get_hash_fn_by_name"](hash_algorithm)
    with _seeded(seed):
        names["init_none_hash"](function)
        request = names["Request"](
            request_id="why",
            prompt_token_ids=list(tokens),
            sampling_params=names["SamplingParams"](max_tokens=1),
            pooling_params=None,
            cache_salt=salt,
            block_hasher=names["get_request_block_hasher"](tokens_per_hash, function),
        )
    return [bytes(one) for one in request.block_hashes]


def _names() -> dict[str, Any]:
    found: dict[str, Any] = {}
    missing = []
    for name, module in _PLACES.items():
        loaded = import_module(module)
        found[name] = None if loaded is None else getattr(loaded, name, None)
        if found[name] is None:
            missing.append(f"{name}: not in {module}")
    if missing:
        raise UnsupportedVLLM(tuple(missing), installed_version())
    return found


@contextmanager
def _seeded(seed: str | None) -> Iterator[None]:
    """The variable as the engine has it, for the block: vLLM reads it when it makes its root hash."""
    before = os.environ.pop(SEED_VARIABLE, None)
    if seed is not None:
        os.environ[SEED_VARIABLE] = seed
    try:
        yield
    finally:
        os.environ.pop(SEED_VARIABLE, None)
        if before is not None:
            os.environ[SEED_VARIABLE] = before
