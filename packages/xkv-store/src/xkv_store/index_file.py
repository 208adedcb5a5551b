"""The file of an LMDB environment, looked at before LMDB maps it.

Owns: what makes LMDB end the process instead of raising: a file that is cut off, or does not begin like an index.
Must not know: what lies in the environment.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from .errors import LACKING, MediumError

if TYPE_CHECKING:
    from pathlib import Path

_META_MAGIC = 0xBEEFC0DE
_META = struct.Struct("<16xII8xQ")  # page header, magic, version, address, map size
_META_PAGE_BYTES = struct.Struct("<40xI")
_META_LAST_PAGE = struct.Struct("<136xQQ")  # last page, transaction
_FRONT_BYTES = 256


class DamagedIndexError(Exception):
    """The environment cannot be used: missing, cut off or not what LMDB expects. It is made anew from the slots."""


def check_whole(data_file: Path) -> None:
    """DamagedIndexError for a file that LMDB would map and then die of: one that ends before its last page."""
    try:
        with data_file.open("rb") as file:
            front = file.read(_FRONT_BYTES)
            page_bytes = _META_PAGE_BYTES.unpack_from(front)[0] if len(front) == _FRONT_BYTES else 0
            if not 512 <= page_bytes <= 1 << 16 or _META.unpack_from(front)[0] != _META_MAGIC:
                raise DamagedIndexError("it does not begin like an index")
            file.seek(page_bytes)
            second = file.read(_FRONT_BYTES)
            size = data_file.stat().st_size
    except FileNotFoundError as error:
        raise DamagedIndexError("it is missing") from error
    except OSError as error:
        if error.errno in LACKING:
            raise MediumError.of(error, f"reading the index {data_file}") from error
        raise DamagedIndexError(f"it cannot be read ({error.strerror})") from error
    if len(second) < _FRONT_BYTES or _META.unpack_from(second)[0] != _META_MAGIC:
        raise DamagedIndexError("its second page is damaged")
    metas = [_META_LAST_PAGE.unpack_from(page) for page in (front, second)]
    last_page, _ = max(metas, key=lambda meta: meta[1])
    if (last_page + 1) * page_bytes > size:
        raise DamagedIndexError(f"it is cut off: {size} bytes, of {(last_page + 1) * page_bytes}")
