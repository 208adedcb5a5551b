"""`--kv-transfer-config`, as it is given to vLLM, looked at before vLLM does.

Owns: reading it (JSON text, or a file of it), and what is wrong with the parts that concern xkv.
Must not know: gateways, cards, how a key is used.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xkv_compat.vllm_symbols import ConfigView, GroupView
from xkv_store.doctor.findings import Finding, fault, ok, warning
from xkv_store.errors import UserError

from .. import config as keys  # noqa: TID252  the package may have another name
from ..config import Config  # noqa: TID252
from ..description import check_supported  # noqa: TID252

CONNECTORS = ("OffloadingConnector", "XkvOffloadingConnector")
ROLES = ("kv_both", "kv_producer", "kv_consumer")
SPEC = "XkvOffloadingSpec"
PACKAGE = (__package__ or "").rpartition(".")[0]
NOT_STARTED = "the engine does not start"
FILE_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """The whole value, and its `kv_connector_extra_config`."""

    value: Mapping[str, Any]
    extra: Mapping[str, Any]


def read_transfer_config(text: str) -> TransferConfig:
    """From JSON, or a file that holds it. Raises UserError where it is neither."""
    if not text.lstrip().startswith("{"):
        try:
            with Path(text).open("rb") as file:
                text = file.read(FILE_BYTES_MAX).decode()
        except (OSError, ValueError) as error:
            raise UserError(
                f"--config {text[:200]!r} is neither JSON nor a file that can be read ({error}); type what "
                "--kv-transfer-config gets, in quotes, or the name of a file that holds it"
            ) from error
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"--config is no JSON ({error}); type what --kv-transfer-config gets, in quotes") from error
    extra = value.get("kv_connector_extra_config", {}) if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(extra, dict):
        raise UserError("--config is no configuration: it and its kv_connector_extra_config are JSON objects")
    return TransferConfig(value, extra)


def examine_connector(config: TransferConfig) -> list[Finding]:
    """Whether vLLM would load xkv at all."""
    value, extra = config.value, config.extra
    found = []
    if value.get("kv_connector") not in CONNECTORS:
        what = f"kv_connector is {value.get('kv_connector')!r}"
        found.append(fault("configuration", what, "xkv is not used", 'give "kv_connector":"OffloadingConnector"'))
    if value.get("kv_role") not in ROLES:
        what = f"kv_role is {value.get('kv_role')!r}"
        found.append(fault("configuration", what, NOT_STARTED, 'give "kv_role":"kv_both"'))
    if extra.get("spec_name") != SPEC:
        what = f"spec_name is {extra.get('spec_name')!r}"
        found.append(fault("configuration", what, "another spec is used", f'give "spec_name":"{SPEC}"'))
    module = str(extra.get("spec_module_path"))
    if module.rpartition(".")[2] != PACKAGE.rpartition(".")[2]:
        what = f"spec_module_path is {extra.get('spec_module_path')!r}"
        found.append(fault("configuration", what, NOT_STARTED, f'give "spec_module_path":"{PACKAGE}"'))
    return found


def examine_keys(config: TransferConfig) -> list[Finding]:
    """Our keys: unknown, mistyped, out of range, contradicting; and those that only look like ours."""
    page = "every key and its range: docs/configuration.md"
    found = []
    for wrong in keys.faults(config.extra):
        what, _, nearest = wrong.partition("; the nearest key is ")
        found.append(
            fault("configuration", what, NOT_STARTED, f"{nearest} in its place, if it was meant" if nearest else page)
        )
    for name, meant in keys.look_alikes(config.extra):
        what = f"{name!r} is no key of xkv, though it looks like one"
        found.append(warning("configuration", what, "it is ignored", f"{meant!r} in its place, if it was meant"))
    return found


def blocks_per_chunk_of(extra: Mapping[str, Any], *, block_tokens: int) -> int:
    """The chunk, in blocks. Raises UserError where that is none."""
    for name, unit in (("blocks_per_chunk", 1), ("block_size", block_tokens)):
        size = extra.get(name)
        if size is None:
            continue
        if not isinstance(size, int) or isinstance(size, bool) or size < unit or size % unit:
            raise UserError(f"{name} is {size!r}; give a multiple of {unit}")
        return size // unit
    return 1


def view_of(
    extra: Mapping[str, Any], *, group_tokens: tuple[int, ...], blocks_per_chunk: int, world_size: int
) -> ConfigView:
    """What vLLM would say to a spec, as far as it is known here. `group_tokens`: a block's, of each group."""
    return ConfigView(
        engine_id="doctor",
        extra_config=extra,
        model="",
        cache_dtype="auto",
        groups=tuple(GroupView(tokens, (), number, None) for number, tokens in enumerate(group_tokens)),
        tokens_per_hash=min(group_tokens),
        blocks_per_chunk=blocks_per_chunk,
        rank=0,
        world_size=world_size,
        tp_size=world_size,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_index=0,
        replicated_hint=None,
        canonical_layout=bool(extra.get("canonical_layout", False)),
        kv_cache_layout=None,
        kv_bytes_per_block=None,
    )


def examine_supported(view: ConfigView, config: Config, features: Mapping[str, bool]) -> list[Finding]:
    """What this vLLM would be refused at start-up, by the same question."""
    try:
        check_supported(view, config, features)
    except UserError as error:
        text = str(error)
        what, _, remedy = text.rpartition("; " if "; " in text else ": ")
        return [fault("configuration", what, NOT_STARTED, remedy)]
    return [ok("configuration", "an engine would take it")]
