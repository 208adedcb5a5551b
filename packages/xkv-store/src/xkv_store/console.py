"""What a command says, as text for people or as one JSON value for programs.

Owns: the choice between the two, the form of an error line and of an object key.
Must not know: any command.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import PeerError, XkvError
from .key import ObjectKey


class UnwritableError(XkvError):
    """Nothing more can be said to whoever reads standard output."""


@dataclass(frozen=True, slots=True)
class Output:
    """`json`: only JSON goes to standard output, one line for each call of `value`."""

    json: bool

    def value(self, value: Mapping[str, Any], text: str) -> None:
        """Say one thing: the value to a program, the text to a person."""
        try:
            print(json.dumps(value, sort_keys=True) if self.json else text, flush=True)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise UnwritableError(f"standard output cannot be written: {error.strerror}") from error

    def table(self, value: Mapping[str, Any], title: str) -> None:
        """Say a (possibly nested) mapping as a table of two columns."""
        if self.json:
            self.value(value, "")
            return
        # Rich costs a fifth of a second at import, and most calls print one line or JSON.
        from rich.console import Console  # noqa: PLC0415
        from rich.table import Table  # noqa: PLC0415

        table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
        for name, entry in _flat("", value):
            table.add_row(name, entry)
        Console(soft_wrap=True, highlight=False).print(table)

    def error(self, message: str) -> None:
        """Say a mistake in one line on standard error; to a program also as JSON on standard output."""
        line = " ".join(message.split())
        sys.stderr.write(f"xkv: {line}\n")
        if self.json:
            self.value({"error": line}, "")


def key_fields(key: bytes) -> dict[str, Any]:
    """The fields of an encoded object key; of bytes that are none, these."""
    try:
        decoded = ObjectKey.decode(key)
    except PeerError:
        return {"key": key.hex()}
    return {
        "namespace": decoded.namespace.hex(),
        "group": decoded.group,
        "block_hash": decoded.block_hash.hex(),
        "rank": decoded.rank,
    }


def _flat(prefix: str, value: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, entry in value.items():
        if isinstance(entry, Mapping):
            rows += _flat(f"{prefix}{name}.", entry)
        elif isinstance(entry, list):
            rows.append((f"{prefix}{name}", str(len(entry))))
            for number, one in enumerate(entry):
                if isinstance(one, Mapping):
                    rows.append((f"{prefix}{name}[{number}]", " ".join(f"{k}={v}" for k, v in one.items())))
                else:
                    rows.append((f"{prefix}{name}[{number}]", str(one)))
        else:
            rows.append((f"{prefix}{name}", str(entry)))
    return rows
