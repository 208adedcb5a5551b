"""Sizes as people write them: `10GiB`, `500 MB`, `4096`.

Owns: the units and the wording of the error.
Must not know: what a size is for.
"""

from __future__ import annotations

import re
from typing import Final

from .errors import UserError

UNITS: Final[dict[str, int]] = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)},
}
_SIZE: Final = re.compile(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([A-Za-z]*)\s*")  # int() refuses thousands of digits
SIZE_BYTES_MAX: Final = 1 << 60  # far above any card, far below an overflow of the formats


def parse_size_bytes(option: str, text: str) -> int:
    """Bytes of a size such as `10GiB`; raises `UserError` that names the option and what to type."""
    match = _SIZE.fullmatch(text)
    scale = UNITS.get(match.group(2).lower()) if match else None
    if match is None or scale is None:
        raise UserError(f"{option} {text!r} is not a size: type a number and a unit, for example 10GiB or 500MB")
    size = int(float(match.group(1)) * scale) if "." in match.group(1) else int(match.group(1)) * scale
    if not 0 < size <= SIZE_BYTES_MAX:
        raise UserError(f"{option} {text!r} is out of range: at least 1 byte, at most {SIZE_BYTES_MAX} bytes")
    return size


def format_size(size_bytes: int) -> str:
    """The largest binary unit that leaves at least 1, with one decimal where needed."""
    for letter, power in (("T", 4), ("G", 3), ("M", 2), ("K", 1)):
        unit = 1024**power
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f}".removesuffix(".0") + f" {letter}iB"
    return f"{size_bytes} B"
