"""`kv_connector_extra_config` to a checked, frozen `Config`.

Owns: the checking of the `xkv.*` keys (unknown, misspelt, mistyped, out of range, contradicting) and the page
`docs/configuration.md` (`python -m xkv_offload.config`).
Must not know: vLLM's own keys (they are left to vLLM), files, sockets: a bad key is an error before any exists.
"""

import difflib
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from xkv_store.errors import UserError
from xkv_store.geometry import HEADER_BYTES, IO_STEP_BYTES
from xkv_store.remote_address import RemoteAddress

from .config_table import BY_NAME, KEYS, Key

logger = logging.getLogger(__name__)

PREFIX = "xkv."
SHOWN_CHARACTERS_MAX = 200  # of a wrong value: an error is one line
RING_SLOTS_MIN = 4  # of one rank: fewer leave no room for a put and a get at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The checked configuration of one engine; the fields are the keys of `config_table` without their prefix."""

    port: int | None
    port_per_rank: bool
    path: Path | None
    capacity_bytes: int | None
    socket_dir: Path | None
    gateway_uid: int | None
    fragment_bytes: int
    ring_bytes: int
    staging_bytes: int
    tp_layout: str
    store_backlog_bytes: int | None
    load_reserve_bytes: int
    staged_bytes: int
    grace_ms: int
    linger_s: float
    io_threads: int
    databases: int
    remote: str | None
    connect_timeout_ms: int
    load_timeout_ms: int
    pending_timeout_ms: int
    heartbeat_timeout_ms: int
    namespace: str
    weights_fingerprint: str
    restore_policy: str
    trust_lora_names: bool
    store_threshold: int
    verify_hits: bool


def parse(extra_config: Mapping[str, object]) -> Config:
    """Check the `xkv.*` keys of `extra_config` and fill in the defaults.

    Raises UserError that names every key at fault with its value, what is allowed and the nearest key.
    """
    for name, meant in look_alikes(extra_config):
        logger.warning(
            "kv_connector_extra_config: %r is ignored; xkv's keys begin with 'xkv.': did you mean %r?", name, meant
        )
    wrong = faults(extra_config)
    if wrong:
        raise UserError("kv_connector_extra_config: " + "; ".join(wrong))
    given = _given(extra_config)
    values: dict[str, object] = {key.field: given.get(key.name, key.default) for key in KEYS}
    if values["port"] is None:
        values["path"] = _folder("xkv.path", str(values["path"] or default_card()))
    if values["socket_dir"] is not None:
        values["socket_dir"] = _folder("xkv.socket_dir", str(values["socket_dir"]))
    for part in ("load_reserve_bytes", "staged_bytes"):
        if values[part] is None:
            values[part] = cast("int", values["ring_bytes"]) // 4
    values["verify_hits"] = values["verify_hits"] or values["databases"] == 0
    values["linger_s"] = float(cast("float", values["linger_s"]))
    return Config(**values)  # type: ignore[arg-type]  # every field is a row of the table, checked above


def faults(extra_config: Mapping[str, object]) -> list[str]:
    """What is wrong with each `xkv.*` key, with its value, what is allowed and the nearest key."""
    given = _given(extra_config)
    own = [fault for name, value in given.items() if (fault := _fault(name, value))]
    return own or _contradictions(given) or _without_a_card(given)


def _given(extra_config: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in extra_config.items() if name.startswith(PREFIX)}


def default_card() -> Path:
    """Where an embedded card lies if nothing is said."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "xkv" / "card"


def _folder(name: str, text: str) -> Path:
    """A path with its `~` resolved; UserError where there is no such home or it can be no path at all."""
    try:
        folder = Path(text).expanduser()
        with suppress(OSError):  # it need not exist yet
            folder.stat()
    except (RuntimeError, ValueError) as error:
        raise UserError(f"kv_connector_extra_config: {name} = {_shown(text)} cannot be a folder ({error})") from error
    return folder


def _shown(value: object) -> str:
    """The value for an error, cut where it is long."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS_MAX else f"{text[:SHOWN_CHARACTERS_MAX]}… ({len(text)} characters)"


def _fault(name: str, value: object) -> str | None:
    key = BY_NAME.get(name)
    if key is None:
        near = difflib.get_close_matches(name, BY_NAME, n=1, cutoff=0.0)
        return f"unknown key {_shown(name)} (value {_shown(value)}); the nearest key is {near[0]!r}"
    if _type_fits(key, value) and _in_range(key, value):
        if name == "xkv.fragment_bytes" and (cast("int", value) + HEADER_BYTES) % IO_STEP_BYTES:
            low = (cast("int", value) + HEADER_BYTES) // IO_STEP_BYTES * IO_STEP_BYTES - HEADER_BYTES
            return (
                f"{name} = {value!r} is not a multiple of {IO_STEP_BYTES:,} less {HEADER_BYTES:,}; "
                f"near it: {low} or {low + IO_STEP_BYTES}"
            )
        return _remote_fault(str(value)) if name == "xkv.remote" else None
    return f"{name} = {_shown(value)} is not allowed: it must be {key.allowed}"


def _remote_fault(value: str) -> str | None:
    try:
        RemoteAddress.parse(value, "xkv.remote")
    except UserError as error:
        return str(error)
    return None


def _type_fits(key: Key, value: object) -> bool:
    if key.kind == "bool":
        return isinstance(value, bool)
    if key.kind == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    if key.kind == "float":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, str)


def _in_range(key: Key, value: object) -> bool:
    if key.kind == "choice":
        return value in key.choices
    if key.low is None or key.high is None:
        return value != "" or key.default == ""
    return key.low <= cast("float", value) <= key.high


def _contradictions(given: Mapping[str, object]) -> list[str]:
    """What is wrong between keys that are each right by themselves."""
    if "xkv.port" in given:
        faults = [
            f"{name} = {given[name]!r} goes with an embedded card only, and xkv.port names a gateway: leave one out"
            for name in given
            if BY_NAME[name].scope == "path"
        ]
        if faults:
            return faults
    if given.get("xkv.port_per_rank"):
        if "xkv.port" not in given:
            return ["xkv.port_per_rank = True needs xkv.port, rank 0's gateway: an embedded card has one gateway"]
        if given.get("xkv.tp_layout") == "replicated":
            fault = "xkv.tp_layout = 'replicated' is one object for all ranks, and with xkv.port_per_rank = True each "
            return [fault + "has a card of its own: leave one of them out"]
    ring = cast("int", given.get("xkv.ring_bytes", BY_NAME["xkv.ring_bytes"].default))
    reserve = cast("int", given.get("xkv.load_reserve_bytes", ring // 4))
    slot = cast("int", given.get("xkv.fragment_bytes", BY_NAME["xkv.fragment_bytes"].default)) + HEADER_BYTES
    if ring < RING_SLOTS_MIN * slot:
        return [f"xkv.ring_bytes = {ring} holds fewer than {RING_SLOTS_MIN} slots of {slot} bytes: make it larger"]
    staged = cast("int", given.get("xkv.staged_bytes", ring // 4))
    for name, part in (("xkv.load_reserve_bytes", reserve), ("xkv.staged_bytes", staged)):
        if part > ring - slot:
            return [f"{name} = {part} leaves no slot of xkv.ring_bytes = {ring} for puts"]
    return []


def _without_a_card(given: Mapping[str, object]) -> list[str]:
    if given.get("xkv.databases") == 0 and "xkv.remote" not in given:
        return ["xkv.databases = 0 is a card that is the remote alone: give its address in xkv.remote"]
    return []


def look_alikes(extra_config: Mapping[str, object]) -> list[tuple[str, str]]:
    """Keys that are not ours and look as if they were meant to be, each with the key that was meant."""
    found = []
    for name in extra_config:
        plain = name.strip().lower().replace("-", ".").replace("_", ".")
        meant = plain.startswith("xkv") or difflib.SequenceMatcher(None, plain.split(".")[0], "xkv").ratio() > 0.6
        if not name.startswith(PREFIX) and meant:
            wanted = PREFIX + plain.split(".", 1)[-1].removeprefix("xkv").replace(".", "_")
            found.append((name, difflib.get_close_matches(wanted, BY_NAME, n=1, cutoff=0.0)[0]))
    return found


def page() -> str:
    """The text of docs/configuration.md."""
    rows = "\n".join(
        f"| `{key.name}` | {_default_text(key)} | {key.allowed} | {key.text}{_SCOPES[key.scope]} |" for key in KEYS
    )
    return _PAGE.format(rows=rows)


def _default_text(key: Key) -> str:
    if key.default_text:
        return key.default_text
    if isinstance(key.default, bool):
        return str(key.default).lower()
    return f"{key.default:,}" if isinstance(key.default, (int, float)) else f'"{key.default}"'


_SCOPES = {"all": "", "port": "", "path": " Embedded card only."}

_PAGE = """# Configuration

<!-- Made by `python -m xkv_offload.config`; edit packages/xkv-offload/src/xkv_offload/config_table.py instead. -->

All keys stand in `kv_connector_extra_config` and begin with `xkv.`. An unknown, misspelt, mistyped or
out-of-range key is a start-up error that names the key, its value, what is allowed and the nearest key, before
any file, socket or memory exists. Keys that merely look like ours (`xkv_port`) are named in a warning. vLLM's own
keys (`spec_name`, `spec_module_path`, `blocks_per_chunk`, `block_size`, `offload_prompt_only`, …) are left to vLLM,
save that a `blocks_per_chunk` which this vLLM does not read is an error that says which `block_size` to type.

| key | default | allowed | meaning |
| --- | --- | --- | --- |
{rows}
"""

if __name__ == "__main__":
    print(page(), end="")
