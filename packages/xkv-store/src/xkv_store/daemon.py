"""`python -m <package>.daemon`: the gateway of an embedded card, as a process that nobody owns.

Owns: its arguments, its detachment (unless its starter has seen to that), its bounded log, who serves when
several are started at once: whoever has the card's lock; the others end quietly.
Must not know: who starts it, and under which name the package is installed.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TYPE_CHECKING, Final

from .card import CardOptions
from .card_lock import CardInUseError
from .card_options import GRACE_MS_DEFAULT
from .embedded import LOG_BYTES_MAX, LOG_NAME
from .errors import MediumError, UserError
from .gateway import LINGER_S_DEFAULT, Gateway, GatewayOptions, spare_garbage_collection
from .io_pool import IO_THREADS_DEFAULT
from .private_files import open_private
from .remote_address import RemoteAddress

if TYPE_CHECKING:
    from collections.abc import Sequence

LOG_FORMAT: Final = "%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"

_UMASK: Final = 0o077

log = logging.getLogger(__name__)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The arguments; ends the process with code 2 where they are wrong."""
    parser = argparse.ArgumentParser(prog="daemon", description="Serve an embedded card.")
    parser.add_argument("--embedded", action="store_true", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--capacity-bytes", type=int)
    parser.add_argument("--databases", type=int)
    parser.add_argument("--grace-ms", type=int, default=GRACE_MS_DEFAULT)
    parser.add_argument("--linger-s", type=float, default=LINGER_S_DEFAULT)
    parser.add_argument("--io-threads", type=int, default=IO_THREADS_DEFAULT)
    parser.add_argument("--slot-bytes", type=int)
    parser.add_argument("--remote")
    parser.add_argument("--detach", action="store_true", help="fork twice; without it the starter has done so")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until the linger is over. 0: served, or somebody else does; 1: could not, the log's last line says why."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    if options.detach:
        _detach()
    try:
        _log_to(options.folder)
        _serve(options)
    except CardInUseError:
        return 0
    except (UserError, MediumError) as error:
        log.error("%s", " ".join(str(error).split()))  # noqa: TRY400  the user's or the medium's: no traceback
        return 1
    except Exception:
        log.exception("an error of ours ends the gateway")
        raise
    log.info("ended")
    return 0


def _serve(options: argparse.Namespace) -> None:
    card = CardOptions(
        folder=options.folder,
        capacity_bytes=options.capacity_bytes,
        databases=options.databases,
        slot_bytes=options.slot_bytes,
        grace_ms=options.grace_ms,
    )
    gateway = Gateway(
        GatewayOptions(
            socket=options.socket,
            card=card,
            io_threads=options.io_threads,
            linger_s=options.linger_s,
            remote=None if options.remote is None else RemoteAddress.parse(options.remote, "xkv.remote"),
        )
    )
    try:
        log.info("serving %s", gateway.open(card_first=True))
        spare_garbage_collection()
        gateway.run()
    finally:
        gateway.close()


def _detach() -> None:
    """Become nobody's child and leave the session: an engine that kills its process tree does not reach us."""
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)


def _log_to(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.umask(_UMASK)  # of the next log, too, which the handler makes
    os.close(open_private(folder / LOG_NAME, os.O_WRONLY | os.O_CREAT))
    handler = RotatingFileHandler(folder / LOG_NAME, maxBytes=LOG_BYTES_MAX, backupCount=1, encoding="utf-8")
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, handlers=[handler])


if __name__ == "__main__":
    sys.exit(main())
