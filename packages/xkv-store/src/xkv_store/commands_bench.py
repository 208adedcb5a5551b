"""`xkv bench`: how fast a folder's medium is, and how long an object takes through a ring and back.

Owns: the command's options, a throw-away gateway in the folder, what is printed.
Must not know: how anything is measured; `xkv doctor` measures the same (`doctor.medium`, `doctor.round_trip`).
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import tempfile
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Optional

import typer

from .commands_gateway import IoThreads, Json, SlotBytes, path_option
from .console import Output
from .doctor.medium import BYTES_MAX, SECONDS_MAX, Effort, measure
from .doctor.round_trip import TripFacts, gather_trip
from .embedded import EmbeddedCard
from .errors import PeerError, UserError
from .geometry import DATA_OFFSET, SLOT_BYTES, Geometry
from .io_pool import IO_THREADS_DEFAULT
from .progress import progress
from .sizes import format_size, parse_size_bytes
from .sockets import socket_for_card
from .tool import Tool
from .wire import LoadStatus

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TRIPS_DEFAULT: Final = 20
TRIPS_MAX: Final = 1_000
SECONDS_LIMIT: Final = 600
CARD_SLOTS: Final = 256  # of the throw-away card: a trip's object leaves before the next one comes
LINGER_S: Final = 10.0  # its gateway's, should nobody be left to end it


def register(app: typer.Typer) -> None:
    """Add this command."""
    app.command(name="bench")(bench_command)


def bench_command(  # noqa: PLR0917  each parameter is an option, and typer passes them by name
    folder: Annotated[
        Path,
        typer.Argument(parser=path_option("FOLDER"), metavar="FOLDER", help="A folder on the medium, say a card's."),
    ],
    size: Annotated[
        Optional[str],  # noqa: UP045  typer reads this at run time, also on Python 3.10
        typer.Option(
            metavar="SIZE",
            help=f"Write and read so much, for example 4GiB [default: {format_size(BYTES_MAX)}], "
            "and no more than a quarter of what is free.",
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=SECONDS_LIMIT, help="End each direction after this time.")
    ] = SECONDS_MAX,
    io_threads: IoThreads = IO_THREADS_DEFAULT,
    slot_bytes: SlotBytes = None,
    trips: Annotated[
        int, typer.Option(min=0, max=TRIPS_MAX, help="Send so many objects through a gateway and back.")
    ] = TRIPS_DEFAULT,
    as_json: Json = False,
) -> None:
    """Measure a folder's medium as a card uses it, and the round trip of an object. Leaves nothing behind."""
    output = Output(json=as_json)
    size_bytes = BYTES_MAX if size is None else parse_size_bytes("--size", size)
    effort = Effort(
        bytes_max=size_bytes,
        seconds_max=seconds,
        slot_bytes=Geometry(slot_bytes).slot_bytes if slot_bytes is not None else SLOT_BYTES,
        threads=io_threads,
    )
    try:
        system = os.statvfs(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} cannot be looked at ({error}); type a folder that is there") from error
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; type one on the medium")
    with progress(output, "writing and reading") as bar:
        bandwidth = measure(folder, effort, free_bytes=system.f_bavail * system.f_frsize, bar=bar)
    value: dict[str, Any] = {"folder": str(folder), "bandwidth": bandwidth.as_value()}
    lines = [f"medium: {bandwidth.as_text()}"]
    if trips:
        with _throw_away(folder, effort) as (card, socket), progress(output, "round trips") as bar:
            bar.expect(trips)
            found = []
            for number in range(trips):
                found.append(_trip(card, socket, effort.slot_bytes))
                bar.advance(number + 1)
        value["round_trip"], line = _summary(found)
        lines.append(line)
    output.value({"bench": value}, "\n".join(lines))


@contextmanager
def _throw_away(folder: Path, effort: Effort) -> Iterator[tuple[EmbeddedCard, Path]]:
    """A card in the folder and the socket of its gateway, which the first who attaches starts; both gone at the end."""
    sockets = Path(tempfile.mkdtemp(prefix="xkv-"))  # not in the folder: a socket's path has at most 107 bytes
    place = None
    try:
        place = Path(tempfile.mkdtemp(prefix=".xkv-bench-", dir=folder))
        card = EmbeddedCard(
            folder=place,
            capacity_bytes=DATA_OFFSET + CARD_SLOTS * effort.slot_bytes,
            grace_ms=0,
            linger_s=LINGER_S,
            io_threads=effort.threads,
            slot_bytes=effort.slot_bytes,
        )
        socket = socket_for_card(sockets, place)
        try:
            yield card, socket
        finally:
            _end_gateway(socket)
    finally:
        shutil.rmtree(sockets, ignore_errors=True)
        if place is not None:
            shutil.rmtree(place, ignore_errors=True)


def _end_gateway(socket: Path) -> None:
    try:
        with closing(Tool(socket)) as tool:
            pid, has_ended = tool.pid, tool.stop()
    except (UserError, PeerError):
        return  # it never came up, or has gone
    if not has_ended:
        os.kill(pid, signal.SIGKILL)


def _trip(card: EmbeddedCard, socket: Path, slot_bytes: int) -> TripFacts:
    facts = gather_trip(socket, slot_bytes=slot_bytes, embedded=card)
    if facts.error:
        raise UserError(f"the round trip failed: {facts.error}")
    if facts.loaded is not LoadStatus.OK or not facts.equal:
        raise PeerError("an object did not come back as it went: xkv doctor looks into it")
    return facts


def _summary(trips: Sequence[TripFacts]) -> tuple[dict[str, Any], str]:
    """For a program, and for a person."""
    object_bytes = trips[0].sent_bytes
    value: dict[str, Any] = {"trips": len(trips), "object_bytes": object_bytes}
    parts = []
    for name, word, seconds in (
        ("put_s", "stored", [one.put_s for one in trips]),
        ("get_s", "read", [one.get_s for one in trips]),
    ):
        middle, worst = statistics.median(seconds), max(seconds)
        value[name] = {"median": round(middle, 6), "max": round(worst, 6)}
        parts.append(f"{word} in {middle * 1_000:.1f} ms (at most {worst * 1_000:.1f} ms)")
    return value, f"round trip: {format_size(object_bytes)} {', '.join(parts)}; medians of {len(trips)}"
