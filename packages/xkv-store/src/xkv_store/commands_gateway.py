"""`xkv gateway run|status|stop`.

Owns: the options of these commands and what they print.
Must not know: how a gateway works.
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Optional

import typer

from . import sockets
from .card import CardOptions
from .card_folder import card_is_there
from .card_options import GRACE_MS_DEFAULT, GRACE_MS_MAX, NO_FOLDER
from .console import Output
from .errors import UserError
from .gateway import Gateway, GatewayOptions, spare_garbage_collection
from .geometry import DATABASES_MAX, SLOT_BYTES
from .io_pool import IO_THREADS_DEFAULT, IO_THREADS_MAX
from .quotas import Quotas
from .remote_address import EXAMPLE, RemoteAddress
from .sizes import format_size, parse_size_bytes
from .tool import NobodyAnswersError, Tool

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PORT_CUSTOMARY: Final = 5557
METRICS_HOST: Final = "127.0.0.1"  # no one else's business unless somebody says so
UID_MAX: Final = (1 << 32) - 2  # the last one means nobody in particular
LOG_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"

gateway_app = typer.Typer(help="Run a gateway, look at one, stop one.", no_args_is_help=True, rich_markup_mode=None)


def path_option(option: str) -> Callable[[str], Path]:
    """The parser of an option (or argument) that is a path."""

    def parse(text: str) -> Path:
        if not text:
            raise UserError(f"{option} is empty: type the path; the current folder is .")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{option} {os.fsencode(text)!r} is not UTF-8: type a path that is") from error
        if "\0" in text:
            raise UserError(f"{option} {text!r} is no path: type one without NUL")
        return Path(text)

    return parse


Port = Annotated[int, typer.Option(min=1, max=65535, help="The gateway's port: names its socket.")]
PortOrElse = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(min=1, max=65535, help=f"The gateway's port; {PORT_CUSTOMARY} is the customary one."),
]
SocketDir = Annotated[
    Optional[Path],  # noqa: UP045  typer reads this at run time, also on Python 3.10
    typer.Option(
        parser=path_option("--socket-dir"),
        metavar="PATH",
        help="Folder of the sockets [default: $XDG_RUNTIME_DIR/xkv, else one of this user's own].",
    ),
]
IoThreads = Annotated[
    int, typer.Option(min=1, max=IO_THREADS_MAX, help="Reads and writes of the medium that go on at once.")
]
SlotBytes = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(help=f"Slot size of a new card [default: {SLOT_BYTES}]."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one line for each value.")]
CardFolder = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        "--card", parser=path_option("--card"), metavar="PATH", help="The embedded gateway of this card's folder."
    ),
]
SocketPath = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--socket", parser=path_option("--socket"), metavar="PATH", help="The socket itself."),
]


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.add_typer(gateway_app, name="gateway")


@gateway_app.command()
def run(  # noqa: PLR0917  each parameter is an option, and typer passes them by name
    card: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            parser=path_option("--card"), metavar="PATH", help="Folder of the card; made where it is missing."
        ),
    ] = None,
    port: Port = PORT_CUSTOMARY,
    capacity: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Size of a new card, for example 10GiB [default: 80 % of what is free, at most 64 GiB]."),
    ] = None,
    databases: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            min=0,
            max=DATABASES_MAX,
            help="Files that a new card is spread over [default: 1]; 0: no card but the remote's, and no folder.",
        ),
    ] = None,
    database: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Option(
            parser=path_option("--database"),
            metavar="PATH",
            help="A file or block device of the card, once for each; instead of --databases.",
        ),
    ] = None,
    grace_ms: Annotated[
        int, typer.Option(min=0, max=GRACE_MS_MAX, help="How long an evicted object can still be read.")
    ] = GRACE_MS_DEFAULT,
    io_threads: IoThreads = IO_THREADS_DEFAULT,
    slot_bytes: SlotBytes = None,
    quota: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            metavar="[PREFIX=]SIZE",
            help="What each namespace may take of the card, or those whose hex form begins with PREFIX; once for each.",
        ),
    ] = None,
    socket_dir: SocketDir = None,
    allow_uid: Annotated[
        Optional[list[int]],  # noqa: UP045
        typer.Option(min=0, max=UID_MAX, help="Another user that may attach; once for each."),
    ] = None,
    socket_group: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="A group whose members may reach the socket."),
    ] = None,
    metrics_port: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=0, max=65535, help="Serve metrics to Prometheus on this port; 0: one that is free."),
    ] = None,
    metrics_host: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help=f"The address that metrics are served on, with --metrics-port [default: {METRICS_HOST}]."),
    ] = None,
    remote: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="URL", help=f"Share objects with other machines, for example {EXAMPLE}."),
    ] = None,
    linger_s: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(min=0, help="End so long after the last session [default: never]."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Serve a card until SIGTERM, SIGINT or `xkv gateway stop`; prints one line when it is ready."""
    if database and databases is not None:
        raise UserError("--databases and --database exclude each other: type how many files, or name each of them")
    if metrics_host == "":
        raise UserError("--metrics-host is empty: type an address; 0.0.0.0 is every one of this machine's")
    if metrics_host is not None and metrics_port is None:
        raise UserError("--metrics-host says where --metrics-port is: type the port, too")
    if (card is None) is not (databases == 0):
        raise UserError(
            "--card is missing: type the folder of the card, or --databases 0 for a remote alone"
            if card is None
            else "--card names a folder, and --databases 0 is a card without one: type one of them"
        )
    output = Output(json=as_json)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    capacity_bytes = None if capacity is None else parse_size_bytes("--capacity", capacity)
    options = GatewayOptions(
        socket=sockets.socket_for_port(socket_dir or sockets.default_socket_dir(), port),
        card=CardOptions(
            folder=card or NO_FOLDER,
            capacity_bytes=capacity_bytes,
            databases=tuple(database) if database else databases,
            slot_bytes=slot_bytes,
            grace_ms=grace_ms,
            create=True,
            quotas=Quotas.parse(quota or []),
        ),
        io_threads=io_threads,
        linger_s=linger_s,
        allow_uids=frozenset(allow_uid or ()),
        socket_group=socket_group,
        metrics=None if metrics_port is None else (metrics_host or METRICS_HOST, metrics_port),
        remote=None if remote is None else RemoteAddress.parse(remote, "--remote"),
    )
    gateway = Gateway(options)
    try:
        status = gateway.open()
        output.value({"ready": True, **status}, _ready_line(status))
        spare_garbage_collection()
        gateway.run()
    finally:
        gateway.close()


def _ready_line(status: Mapping[str, object]) -> str:
    capacity_bytes = status["capacity_bytes"]
    assert isinstance(capacity_bytes, int)
    if not status["databases"]:
        return f"xkv gateway ready: socket {status['socket']}, {status['card']} alone, pid {status['pid']}"
    direct = "O_DIRECT" if status["direct"] else "without O_DIRECT (refused here: page cache, more copies)"
    metrics = f", metrics at {status['metrics']}" if status["metrics"] else ""
    return (
        f"xkv gateway ready: socket {status['socket']}, card {status['card']}, "
        f"{format_size(capacity_bytes)}, {direct}, pid {status['pid']}{metrics}"
    )


@gateway_app.command()
def status(
    port: PortOrElse = None,
    socket_dir: SocketDir = None,
    card: CardFolder = None,
    socket: SocketPath = None,
    as_json: Json = False,
) -> None:
    """Show a running gateway's card, counters and sessions."""
    remedy = f"`xkv namespaces {card}` and `xkv ls {card}` look at it all the same"
    with closing(_tool(port, socket_dir, card, socket, remedy)) as tool:
        value = json.loads(tool.status())
    Output(json=as_json).table(value, "gateway")


@gateway_app.command()
def stop(
    port: PortOrElse = None,
    socket_dir: SocketDir = None,
    card: CardFolder = None,
    socket: SocketPath = None,
    as_json: Json = False,
) -> None:
    """Make a running gateway finish what it has begun and end; returns when it has ended."""
    with closing(_tool(port, socket_dir, card, socket, "there is nothing to stop")) as tool:
        if not tool.stop():
            raise UserError(f"the gateway (pid {tool.pid}) is still finishing its work; look again with `status`")
        Output(json=as_json).value({"stopped": tool.pid}, f"gateway stopped (pid {tool.pid})")


def _tool(port: int | None, socket_dir: Path | None, card: Path | None, socket: Path | None, remedy: str) -> Tool:
    """Attached to the gateway that these options name; `remedy`: where nobody serves the card."""
    try:
        return Tool(named_socket(port, socket_dir, card, socket))
    except NobodyAnswersError as error:
        if card is None:
            raise
        if not card_is_there(card):
            raise UserError(f"there is no card in {card}: type another folder, or --port of its gateway") from error
        raise UserError(
            f"no engine's gateway serves the card in {card} just now (it ends some time after the engines; another one "
            f"is named by --port): {remedy}"
        ) from error


def named_socket(port: int | None, socket_dir: Path | None, card: Path | None, socket: Path | None) -> Path:
    """The socket that these options name: the path itself, the card's embedded gateway, or the port's."""
    named = {"--port": port, "--card": card, "--socket": socket}
    given = [option for option, value in named.items() if value is not None]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} each name a gateway: type one of them")
    if socket is not None and socket_dir is not None:
        raise UserError("--socket names the socket itself: leave --socket-dir out")
    if socket is not None:
        return socket
    folder = socket_dir or sockets.default_socket_dir()
    if card is not None:
        return sockets.socket_for_card(folder, card)
    return sockets.socket_for_port(folder, PORT_CUSTOMARY if port is None else port)
