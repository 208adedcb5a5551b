"""`xkv verify`: a card's objects proved, by the gateway that serves it or here where none does; its index made anew.

Owns: the command's options, the choice between the two, what is printed, and what a person may type next.
Must not know: how an object is proved, or where damage comes from.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path  # noqa: TC003  typer reads this at run time
from typing import Annotated, Final, Optional

import typer

from . import sockets
from .card_lock import CardInUseError
from .card_options import CardOptions
from .commands_gateway import Json, PortOrElse, SocketDir, SocketPath, named_socket, path_option
from .console import Output, key_fields
from .errors import MediumError, PeerError, UserError
from .progress import progress
from .served import serves, serving
from .sizes import format_size
from .tool import Tool
from .verify import Beginning, DamagedIndex, Unnamed, Verified, rebuild, verify
from .wire import VerifyState

EXIT_DAMAGE: Final = 1


def register(app: typer.Typer) -> None:
    """Add this command."""
    app.command(name="verify")(verify_command)


def verify_command(  # noqa: PLR0917  each parameter is an option, and typer passes them by name
    card: Annotated[
        Optional[Path],  # noqa: UP045  typer reads this at run time, also on Python 3.10
        typer.Argument(parser=path_option("CARD"), metavar="CARD", help="Folder of the card."),
    ] = None,
    drop: Annotated[bool, typer.Option("--drop", help="Take what is damaged off the card.")] = False,
    rebuild_index: Annotated[
        bool, typer.Option("--rebuild", help="First make the index anew from the slots; no gateway may have the card.")
    ] = False,
    port: PortOrElse = None,
    socket_dir: SocketDir = None,
    socket: SocketPath = None,
    as_json: Json = False,
) -> None:
    """Read and prove every object of a card; ends with 1 where something is damaged.

    Where a gateway serves the card, that gateway does it, behind its loads and stores.
    """
    if card is None and port is None and socket is None:
        raise UserError("type the folder of the card, or --port or --socket of the gateway that serves it")
    if rebuild_index and any(one is not None for one in (port, socket_dir, socket)):
        raise UserError("--rebuild is for a card that no gateway has: stop it, and type the card's folder alone")
    output = Output(json=as_json)
    if port is None and socket is None:
        assert card is not None
        try:
            raise typer.Exit(_offline(card, output, drop=drop, rebuild_index=rebuild_index))
        except CardInUseError as in_use:
            if rebuild_index:
                raise UserError(f"{in_use}; an index is made anew only where no gateway has the card") from in_use
            tool = serving(card, socket_dir or sockets.default_socket_dir(), in_use)
    else:
        tool = Tool(named_socket(port, socket_dir, None, socket))
    with closing(tool):
        if card is not None and not serves(tool, card):
            raise UserError(f"that gateway (pid {tool.pid}) serves another card than the one in {card}")
        raise typer.Exit(_online(tool, card, output, drop=drop))


# --- without a gateway ------------------------------------------------------------------------------------------


def _offline(card: Path, output: Output, *, drop: bool, rebuild_index: bool) -> int:
    options = CardOptions(folder=card, create=False)
    if rebuild_index:
        with progress(output, "making the index anew"):
            status = rebuild(options)
        facts = {name: status[name] for name in ("card_uuid", "objects", "object_bytes", "slots_total")}
        output.value({"rebuilt": facts}, f"the index was made anew from the slots: {facts['objects']} objects")
    report = _Report(output, f"xkv verify {card}", online=False)
    with progress(output, "proving") as bar:
        for found in verify(options, drop=drop):
            match found:
                case Beginning(objects):
                    bar.expect(objects)
                case DamagedIndex(problem, whole):
                    report.damaged_index(problem, whole)
                case Unnamed(whole):
                    report.unnamed = whole
                case Verified():
                    report.verified(found)
            bar.advance(report.objects)
    return report.close()


# --- by the gateway ---------------------------------------------------------------------------------------------


def _online(tool: Tool, card: Path | None, output: Output, *, drop: bool) -> int:
    report = _Report(output, f"xkv verify {card}" if card is not None else "the same command", online=True)
    with progress(output, "proving") as bar:
        for told in tool.verify(drop=drop):
            if told.state is VerifyState.BUSY:
                raise UserError(f"{told.reason}; wait for it, or look again later")
            report.objects, report.gone, report.proved_bytes = told.objects, told.gone, told.proved_bytes
            for one in told.damaged:
                report.damage(Verified(one.key, one.generation, one.length, one.problem, dropped=one.dropped))
            bar.expect(told.objects_total)
            bar.advance(told.objects)
    if told.state is VerifyState.STOPPED:
        raise PeerError(f"{told.reason}: {told.objects} of {told.objects_total} objects were proved")
    if told.state is VerifyState.FAILED:
        raise MediumError(0, told.reason)
    return report.close()


# --- what is said -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Report:
    output: Output
    command: str  # that was typed
    online: bool
    objects: int = 0
    proved_bytes: int = 0
    damaged: int = 0
    misplaced: int = 0
    dropped: int = 0
    gone: int = 0
    unnamed: int = 0
    index_problem: str = ""

    def verified(self, found: Verified) -> None:
        self.objects += 1
        if found.problem:
            self.damage(found)
        else:
            self.proved_bytes += found.length

    def damage(self, found: Verified) -> None:
        """Say it at once: a run may be long."""
        self.damaged += 1
        self.misplaced += found.misplaced and not found.dropped
        self.dropped += found.dropped
        place = key_fields(found.key)
        value = {**place, "generation": found.generation, "length": found.length}
        value |= {"problem": found.problem, "dropped": found.dropped}
        words = " ".join(f"{name} {entry}" for name, entry in place.items())
        end = "; dropped" if found.dropped else ""
        self.output.value({"damaged": value}, f"damaged: {words}, generation {found.generation}: {found.problem}{end}")

    def damaged_index(self, problem: str, whole: int) -> None:
        self.index_problem = problem
        self.output.value(
            {"damaged_index": {"problem": problem, "whole_objects": whole}},
            f"the index is damaged: {problem}; the slots tell of {whole} whole objects",
        )

    def close(self) -> int:
        """Say the sum, and what may be typed now; the exit code."""
        facts = asdict(self)
        names = ("online", "objects", "proved_bytes", "damaged", "misplaced", "dropped", "gone", "unnamed")
        advice = self._advice()
        found = f"{self.damaged} damaged" if self.damaged else "all sound"
        text = f"{self.objects} objects proved ({format_size(self.proved_bytes)}): {found}"
        if self.index_problem:
            text = "no object was proved"
        self.output.value(
            {"verified": {name: facts[name] for name in names}, "advice": advice}, "\n".join([text, *advice])
        )
        return EXIT_DAMAGE if self.damaged or self.index_problem else 0

    def _advice(self) -> list[str]:
        advice = []
        if self.index_problem:
            advice.append(f"type `{self.command} --rebuild` to make the index anew from the slots")
        if self.misplaced:
            advice.append(
                f"{self.misplaced} are not where the index says: `{self.command} --rebuild` makes it anew from slots"
            )
        if self.damaged > self.dropped:
            advice.append(f"`{self.command} --drop` takes what is damaged off the card; until then it is never served")
        if self.unnamed:
            advice.append(
                f"{self.unnamed} whole objects on the medium are not in the index: they have left the card, or the "
                f"index has lost them; `{self.command} --rebuild` takes them in"
            )
        return advice
