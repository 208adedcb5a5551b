"""Which gateway serves a card, asked by a command that was given the card's folder.

Owns: trying the sockets of a folder, and the words for where none of them is the card's.
Must not know: what the command wants of the gateway.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Final

from . import sockets
from .errors import UserError
from .tool import Tool

if TYPE_CHECKING:
    from pathlib import Path

    from .card_lock import CardInUseError

SOCKETS_ASKED_MAX: Final = 64  # of the folder of sockets; each gateway there answers within a moment


def serving(card: Path, folder: Path, in_use: CardInUseError) -> Tool:
    """The gateway that serves the card, of those whose sockets are in the folder; UserError where it is none."""
    paths = [sockets.socket_for_card(folder, card), *sorted(folder.glob("*.sock"))[:SOCKETS_ASKED_MAX]]
    for path in paths:
        try:
            tool = Tool(path)
        except UserError:
            continue  # nobody, or not ours to ask
        try:
            if serves(tool, card):
                return tool
        except UserError:
            pass
        tool.close()
    raise UserError(f"{in_use}; it listens in another folder than {folder}: name it with --socket-dir or --socket")


def serves(tool: Tool, card: Path) -> bool:
    """Whether that gateway's card is this one."""
    served: str = json.loads(tool.status())["card"]
    return os.path.realpath(served) == os.path.realpath(card)
