"""`xkv namespaces`, `xkv ls`, `xkv purge`: what a card holds, and taking some of it off.

Owns: the options of these commands, what is printed, what is asked before something leaves.
Must not know: whether a gateway serves the card, or how an object leaves.
"""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Optional

import typer

from .card_view import CardView, viewing
from .commands_gateway import Json, PortOrElse, SocketDir, SocketPath, named_socket, path_option
from .console import Output, key_fields
from .errors import UserError
from .identities import printable
from .progress import progress
from .selection import Selection
from .sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .contents import HeldNamespace, HeldObject

NAMED_MAX: Final = 3  # namespaces that an error names
TOLD_EVERY: Final = 4_096  # objects between two looks at the bar
EXIT_DECLINED: Final = 1

Card = Annotated[
    Optional[Path],  # noqa: UP045  typer reads this at run time, also on Python 3.10
    typer.Argument(parser=path_option("CARD"), metavar="CARD", help="Folder of the card."),
]
Namespace = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--namespace", metavar="DIGITS", help="Of the namespace whose hex form begins so."),
]
Key = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--key", metavar="DIGITS", help="Objects whose key's hex form begins so."),
]
BlockHash = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--block-hash", metavar="DIGITS", help="Objects whose block hash's hex form begins so."),
]
Before = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--before", min=0, metavar="GENERATION", help="Objects older than this one's generation."),
]


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.command(name="namespaces")(namespaces_command)
    app.command(name="ls")(ls_command)
    app.command(name="purge")(purge_command)


@contextmanager
def _view(card: Path | None, port: int | None, socket_dir: Path | None, socket: Path | None) -> Iterator[CardView]:
    if card is None and port is None and socket is None:
        raise UserError("type the folder of the card, or --port or --socket of the gateway that serves it")
    named = None if port is None and socket is None else named_socket(port, socket_dir, None, socket)
    with viewing(card, socket_dir, named) as view:
        yield view


# --- namespaces -------------------------------------------------------------------------------------------------


def namespaces_command(
    card: Card = None,
    port: PortOrElse = None,
    socket_dir: SocketDir = None,
    socket: SocketPath = None,
    as_json: Json = False,
) -> None:
    """Show the namespaces of a card: what they hold, may hold, and what they stand for."""
    output = Output(json=as_json)
    with _view(card, port, socket_dir, socket) as view, progress(output, "counting"):
        found = view.namespaces()
        online = view.online
    if found and not as_json:
        output.value({}, f"{'NAMESPACE':<32}  {'OBJECTS':>9}  {'HELD':>10}  {'QUOTA':>10}  STANDS FOR")
    for one in found:
        output.value({"namespace": _namespace_value(one)}, _namespace_line(one))
    total = {
        "namespaces": len(found),
        "objects": sum(one.objects for one in found),
        "held_bytes": sum(one.held_bytes for one in found),
        "online": online,
    }
    output.value(
        {"total": total},
        f"{_many(len(found), 'namespace')}, {_many(total['objects'], 'object')}, {format_size(total['held_bytes'])}",
    )


def _namespace_value(one: HeldNamespace) -> dict[str, Any]:
    return {
        "namespace": one.namespace.hex(),
        "objects": one.objects,
        "held_bytes": one.held_bytes,
        "limbo_bytes": one.limbo_bytes,
        "quota_bytes": one.quota_bytes,
        "description": _description(one.descriptor),
    }


def _namespace_line(one: HeldNamespace) -> str:
    quota = "-" if one.quota_bytes is None else format_size(one.quota_bytes)
    held = format_size(one.held_bytes)
    return f"{one.namespace.hex()}  {one.objects:>9}  {held:>10}  {quota:>10}  {_stands_for(one.descriptor)}"


def _description(descriptor: str) -> Any:
    """The JSON of it; text that is none as it is, None where nothing was published."""
    try:
        return json.loads(descriptor) if descriptor else None
    except (ValueError, RecursionError):
        return descriptor


def _stands_for(descriptor: str) -> str:
    """The model and what else tells one namespace from another at a glance, where an engine has published that."""
    if not descriptor:
        return "(nothing was published)"
    facts = _dug(_description(descriptor), "facts")
    words = {
        "": _dug(facts, "model", "model"),
        "KV ": _dug(facts, "cache_dtype"),
        "vLLM ": _dug(facts, "vllm"),
        "blocks per chunk ": _dug(facts, "blocks_per_chunk"),
    }
    told = [f"{name}{word}" for name, word in words.items() if isinstance(word, str | int)]
    return printable(" ".join(", ".join(told).split())) or "(see --json)"


def _dug(value: Any, *names: str) -> Any:
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


# --- objects ----------------------------------------------------------------------------------------------------


def ls_command(  # noqa: PLR0917  as above
    card: Card = None,
    namespace: Namespace = None,
    key: Key = None,
    block_hash: BlockHash = None,
    before: Before = None,
    limit: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Show so many at most [default: all]."),
    ] = None,
    port: PortOrElse = None,
    socket_dir: SocketDir = None,
    socket: SocketPath = None,
    as_json: Json = False,
) -> None:
    """Show the objects of a card, in the order of their keys."""
    output = Output(json=as_json)
    selection = Selection.parse(namespace=namespace, key=key, block_hash=block_hash, before=before)
    shown = object_bytes = 0
    more = False
    with _view(card, port, socket_dir, socket) as view:
        for one in selection.of(view.objects(selection.prefix)):
            more = shown == limit
            if more:
                break
            if not shown and not as_json:
                output.value({}, f"{'GROUP':>5}  {'RANK':>4}  {'GENERATION':>12}  {'BYTES':>12}  {'POSITION':>8}  KEY")
            shown += 1
            object_bytes += one.length
            output.value({"object": _object_value(one)}, _object_line(one))
        online = view.online
    total = {"objects": shown, "object_bytes": object_bytes, "more": more, "online": online}
    text = f"{_many(shown, 'object')}, {format_size(object_bytes)}"
    output.value({"total": total}, f"{text}; there are more (--limit)" if more else text)


def _object_value(one: HeldObject) -> dict[str, Any]:
    value = {**key_fields(one.key), "key": one.key.hex(), "generation": one.generation}
    return value | {"length": one.length, "position": one.position}


def _object_line(one: HeldObject) -> str:
    fields = key_fields(one.key)
    group, rank = fields.get("group", "?"), fields.get("rank", "?")
    return f"{group:>5}  {rank:>4}  {one.generation:>12}  {one.length:>12}  {one.position:>8}  {one.key.hex()}"


# --- taking off -------------------------------------------------------------------------------------------------


def purge_command(  # noqa: PLR0917  as above
    card: Card = None,
    namespace: Namespace = None,
    key: Key = None,
    block_hash: BlockHash = None,
    before: Before = None,
    everything: Annotated[bool, typer.Option("--all", help="Every object of the card.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    port: PortOrElse = None,
    socket_dir: SocketDir = None,
    socket: SocketPath = None,
    as_json: Json = False,
) -> None:
    """Take objects off a card: a namespace, older ones, those of a key, or all; asks first.

    Where a gateway serves the card, they leave as evicted objects do: a hit that was just given is kept.
    """
    output = Output(json=as_json)
    selection = Selection.parse(namespace=namespace, key=key, block_hash=block_hash, before=before)
    if selection.is_everything is not everything:
        raise UserError(
            "type what is to leave: --namespace, --key, --block-hash, --before, or --all"
            if not everything
            else "--all and a choice exclude each other: type one of the two"
        )
    if not yes and (as_json or not sys.stdin.isatty()):
        raise UserError("there is nobody to be asked here: type --yes to take off what you have named")
    with _view(card, port, socket_dir, socket) as view:
        purge = _Purge(view, selection, output)
        names = purge.names(whole=namespace is not None)
        objects, object_bytes = purge.count()
    what = f"{_many(objects, 'object')} ({format_size(object_bytes)})"
    if namespace is not None:
        what += f" of namespace {names[0].hex()}"
    if objects and not yes and not typer.confirm(f"Take {what} off the card?", err=True):
        output.value({}, "nothing has left")
        raise typer.Exit(EXIT_DECLINED)
    # Anew: a gateway waits for no tool as long as a person may take to answer, nor should the card's lock be held.
    with _view(card, port, socket_dir, socket) as view:
        total = _Purge(view, selection, output).run(objects, names)
    text = f"{_many(total['objects'], 'object')} left ({format_size(total['object_bytes'])})"
    output.value({"purged": total}, text if total["objects"] else "nothing had to leave")


class _Purge:
    """What one call of the command does with the card that it has in view."""

    def __init__(self, view: CardView, selection: Selection, output: Output) -> None:
        self._view = view
        self._selection = selection
        self._output = output

    def names(self, *, whole: bool) -> list[bytes]:
        """The namespaces to be forgotten; with `whole` exactly one must be meant. UserError."""
        selection = self._selection
        if not (whole or selection.is_everything):
            return []
        meant = [one.namespace for one in self._view.namespaces() if one.namespace.hex().startswith(selection.digits)]
        if whole and not meant:
            raise UserError(f"no namespace of the card begins with {selection.digits}: `xkv namespaces` shows them")
        if whole and len(meant) > 1:
            some = ", ".join(one.hex() for one in meant[:NAMED_MAX])
            raise UserError(f"{len(meant)} namespaces begin with {selection.digits} ({some}…): type more digits of one")
        return meant

    def count(self) -> tuple[int, int]:
        """Objects that are meant, and their bytes."""
        objects = object_bytes = 0
        with progress(self._output, "counting") as bar:
            for one in self._meant():
                objects += 1
                object_bytes += one.length
                if not objects % TOLD_EVERY:
                    bar.advance(objects)
        return objects, object_bytes

    def run(self, expected: int, names: list[bytes]) -> dict[str, Any]:
        """Take them off, forget what was published of namespaces that are meant whole; the sum."""
        objects = object_bytes = 0
        with progress(self._output, "purging") as bar:
            bar.expect(expected)
            for left, left_bytes in self._view.purge(self._meant()):
                objects += left
                object_bytes += left_bytes
                bar.advance(objects)
        forgotten = self._view.forget(names) if self._selection.is_namespaces else 0
        sums = {"objects": objects, "object_bytes": object_bytes, "namespaces": forgotten}
        return {**sums, "online": self._view.online}

    def _meant(self) -> Iterator[HeldObject]:
        return self._selection.of(self._view.objects(self._selection.prefix))


def _many(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
