"""`xkv why` where no engine's package has one of its own: of objects by key, and of two namespaces.

Owns: the options of the part that needs no engine, and how an answer is printed.
Must not know: how the answer is found.
"""

from __future__ import annotations

import textwrap
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final, Optional

import typer

from .card_view import viewing
from .commands_contents import Card  # noqa: TC001  typer reads this at run time
from .commands_gateway import Json, PortOrElse, SocketDir, SocketPath, named_socket
from .console import Output, key_fields
from .errors import PeerError, UserError
from .geometry import HASH_BYTES_MAX, NAMESPACE_BYTES, RANK_MAX
from .inquiry import Inquiry
from .key import ObjectKey
from .selection import Selection
from .unused_options import refuse_unused

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .explanation import Explanation

EXIT_MISS: Final = 1
COLUMNS: Final = 120
GROUP_MAX: Final = 2**32 - 1

WhyKey = Annotated[
    Optional[str],  # noqa: UP045  typer reads this at run time, also on Python 3.10
    typer.Option("--key", metavar="DIGITS", help="The object with this key (all digits, as xkv ls and logs have it)."),
]
Generation = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(min=1, help="That generation of it."),
]
WhyNamespace = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--namespace", metavar="DIGITS", help="The engine's namespace, as its log says at the start."),
]
Other = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--other", metavar="DIGITS", help="Compare with this namespace."),
]
WhyHash = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--block-hash", metavar="DIGITS", help="The chunk with this block hash (all digits)."),
]
Group = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(min=0, max=GROUP_MAX, help="The chunk's KV-cache group [default: 0]."),
]
Ranks = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(min=1, max=RANK_MAX + 1, help="Of how many ranks the chunk has objects [default: 1]."),
]


def register(app: typer.Typer) -> None:
    """Add this command."""
    app.command(name="why")(why_command)


def why_command(  # noqa: PLR0917  each parameter is an option, and typer passes them by name
    card: Card = None,
    key: WhyKey = None,
    generation: Generation = None,
    namespace: WhyNamespace = None,
    other: Other = None,
    block_hash: WhyHash = None,
    group: Group = None,
    ranks: Ranks = None,
    port: PortOrElse = None,
    socket_dir: SocketDir = None,
    socket: SocketPath = None,
    as_json: Json = False,
) -> None:
    """Say why a lookup misses: of an object, of a chunk, or what makes two namespaces two.

    Ends with 0 where it would hit, with 1 where it misses. Tokens and an engine's configuration are asked about where
    xkv-offload is installed.
    """
    output = Output(json=as_json)
    check_question(
        key=key,
        block_hash=block_hash,
        namespace=namespace,
        other=other,
        generation=generation,
        group=group,
        ranks=ranks,
    )
    with inquiring(card, port, socket_dir, socket) as inquiry:
        answer, about = ask(
            inquiry, key=key, generation=generation, namespace=namespace, other=other, block_hash=block_hash,
            group=group or 0, ranks=ranks or 1,
        )  # fmt: skip
    raise typer.Exit(say(output, answer, about))


@contextmanager
def inquiring(card: Path | None, port: int | None, socket_dir: Path | None, socket: Path | None) -> Iterator[Inquiry]:
    """The card that the options name, in view."""
    if card is None and port is None and socket is None:
        raise UserError("type the folder of the card, or --port or --socket of the gateway that serves it")
    named = None if port is None and socket is None else named_socket(port, socket_dir, None, socket)
    with viewing(card, socket_dir, named) as view:
        yield Inquiry(view)


def check_question(
    *,
    key: str | None,
    block_hash: str | None,
    namespace: str | None,
    other: str | None,
    generation: int | None,
    group: int | None,
    ranks: int | None,
    others: str = "",
) -> None:
    """UserError unless exactly one question is asked, with nothing that means nothing to it.

    `others`: what else the command would take for a question.
    """
    if sum(one is not None for one in (key, block_hash, other)) != 1:
        raise UserError(
            f"type one question: {others}--key, or --namespace with --block-hash, or --namespace with --other"
        )
    if key is not None and namespace is not None:
        raise UserError("a --key begins with its namespace: leave --namespace out")
    if key is None and namespace is None:
        raise UserError("type --namespace: the engine's log says it at its start, and `xkv namespaces` shows them")
    of_chunk = {"--group": group, "--ranks": ranks}
    if other is not None:
        refuse_unused(
            {"--generation": generation, **of_chunk}, "two namespaces are compared, and no object is asked about"
        )
    if key is not None:
        refuse_unused(of_chunk, "a --key says its group and its rank")
    if ranks is not None and ranks > 1:
        refuse_unused({"--generation": generation}, "each rank's object has one of its own")


def ask(
    inquiry: Inquiry,
    *,
    key: str | None,
    generation: int | None,
    namespace: str | None,
    other: str | None,
    block_hash: str | None,
    group: int,
    ranks: int,
) -> tuple[Explanation, dict[str, Any]]:
    """The answer, and what it is about."""
    if key is not None:
        encoded = _whole_key(key)
        return inquiry.chunk([encoded], generation=generation), {"key": encoded.hex(), **key_fields(encoded)}
    assert namespace is not None
    own = inquiry.named("--namespace", digits_of("--namespace", namespace))
    if other is not None:
        theirs = inquiry.named("--other", digits_of("--other", other))
        return inquiry.compare(own, theirs), {"namespace": own.hex(), "other": theirs.hex()}
    assert block_hash is not None
    digits = Selection.parse(namespace=None, key=None, block_hash=block_hash, before=None).hash_digits
    if len(digits) % 2 or len(digits) > 2 * HASH_BYTES_MAX:
        raise UserError(f"--block-hash {block_hash!r} is not a whole one: type all its digits")
    keys = [ObjectKey(own, group, bytes.fromhex(digits), rank).encode() for rank in range(ranks)]
    about = {"namespace": own.hex(), "group": group, "block_hash": digits, "ranks": ranks}
    return inquiry.chunk(keys, generation=generation), about


def say(output: Output, answer: Explanation, about: dict[str, Any]) -> int:
    """Print the answer; the exit code."""
    output.value(answer.as_value() | {"about": about}, as_text(answer))
    return EXIT_MISS if answer.misses else 0


def digits_of(option: str, text: str) -> str:
    """The beginning of a namespace's hex form. UserError."""
    digits = Selection.parse(namespace=text, key=None, block_hash=None, before=None).digits
    if len(digits) > 2 * NAMESPACE_BYTES:
        raise UserError(f"{option} {text!r} has more digits than a namespace")
    return digits


def as_text(answer: Explanation) -> str:
    """For people: the verdict, then what follows and what to type."""
    lines = _wrapped(f"{answer.verdict.value.replace('_', ' ')}: ", answer.what)
    for name, text in (("follows", answer.follows), ("type", answer.remedy)):
        if text:
            lines += _wrapped(f"  {name + ':':<9}", text)
    return "\n".join(lines)


def _wrapped(first: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        COLUMNS,
        initial_indent=first,
        subsequent_indent=" " * min(len(first), 11),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _whole_key(text: str) -> bytes:
    digits = Selection.parse(namespace=None, key=text, block_hash=None, before=None).digits
    try:
        encoded = bytes.fromhex(digits)
        ObjectKey.decode(encoded)
    except (ValueError, PeerError) as error:
        raise UserError(f"--key {text!r} is not a whole key ({error}): type all digits that `xkv ls` shows") from error
    return encoded
