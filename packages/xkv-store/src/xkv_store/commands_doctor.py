"""`xkv doctor` where no engine's package has one of its own.

Owns: the options of the part that needs no engine, which such a package's command has too, and what is printed.
Must not know: what is looked at, and how.
"""

from __future__ import annotations

from pathlib import Path  # noqa: TC003  typer reads this at run time
from typing import Annotated, Optional

import typer

from .commands_gateway import CardFolder, Json, PortOrElse, SocketDir, SocketPath, named_socket
from .console import Output
from .doctor.examination import RING_BYTES_DEFAULT, Examined, Subject, examine
from .doctor.findings import as_text, as_value, exit_code, note
from .progress import progress
from .sizes import parse_size_bytes

Pid = Annotated[
    Optional[int],  # noqa: UP045  typer reads this at run time, also on Python 3.10
    typer.Option(min=1, help="Take limits (and the environment) of this process, say a running engine's."),
]
NoBandwidth = Annotated[bool, typer.Option("--no-bandwidth", help="Do not measure the card's medium.")]
RingBytes = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--ring", metavar="SIZE", help="The engine's xkv.ring_bytes, for example 1GiB [default: 1GiB]."),
]


def register(app: typer.Typer) -> None:
    """Add this command."""
    app.command(name="doctor")(doctor_command)


def doctor_command(  # noqa: PLR0917  each parameter is an option, and typer passes them by name
    port: PortOrElse = None,
    socket_dir: SocketDir = None,
    card: CardFolder = None,
    socket: SocketPath = None,
    ring: RingBytes = None,
    pid: Pid = None,
    no_bandwidth: NoBandwidth = False,
    as_json: Json = False,
) -> None:
    """Look for what is wrong with the machine, the gateway and the card; ends with 1 where something is.

    This part needs no engine: vLLM, its configuration and models are looked at where xkv-offload is installed.
    """
    subject = subject_of(port, socket_dir, card, socket, ring, pid, measures=not no_bandwidth)
    output = Output(json=as_json)
    with progress(output, "measuring the medium") as bar:
        examined = examine(subject, bar)
    examined.findings.append(
        note(
            "vLLM",
            "not looked at: xkv-offload is not installed in this Python",
            "hash seed, vLLM's features, the engine's configuration and chunk sizes were not looked at",
            "install xkv-offload of this release into vLLM's environment, and run xkv doctor there",
        )
    )
    raise typer.Exit(say(output, examined))


def subject_of(  # noqa: PLR0917  the options, in the order of the command
    port: int | None,
    socket_dir: Path | None,
    card: Path | None,
    socket: Path | None,
    ring: str | None,
    pid: int | None,
    *,
    measures: bool,
) -> Subject:
    """What these options name."""
    is_embedded = card is not None and port is None and socket is None
    return Subject(
        # A gateway may be named beside a card: where it does not answer, the card is looked at all the same.
        socket=named_socket(port, socket_dir, card if is_embedded else None, socket),
        card=card,
        embedded=is_embedded,
        ring_bytes=RING_BYTES_DEFAULT if ring is None else parse_size_bytes("--ring", ring),
        pid=pid,
        measures=measures,
    )


def say(output: Output, examined: Examined) -> int:
    """Print the report; the exit code."""
    output.value(as_value(examined.findings, examined.measured()), as_text(examined.findings))
    return exit_code(examined.findings)
