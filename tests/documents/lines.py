"""Command lines as people find them: taken out of pages, and held against the command line's own options.

Owns: what of a page is a command, how a line is read, and whether `xkv` and vLLM's flag would take it.
Must not know: which commands there are in which page.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer.main

from xkv_offload.config_table import KEYS
from xkv_offload.doctor import command as doctor
from xkv_offload.why import command as why
from xkv_store import cli

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from xkv_store.contributed import Commands

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"(?ms)^(?P<indent> *)```(?P<kind>\S*)\n(?P<text>.*?)^(?P=indent)```$")
ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")
OWN_KEY = "xkv."
OTHERS: Commands = {"doctor": lambda: doctor.register, "why": lambda: why.register}
"""What xkv-offload brings, whether or not its metadata says so here."""


@dataclass(frozen=True, slots=True)
class Line:
    """One command of a page, as words; comments are gone, what several lines say is one."""

    page: str
    text: str
    words: tuple[str, ...]

    @property
    def program(self) -> tuple[str, ...]:
        """The words without the variables that are set before them."""
        words = list(self.words)
        while words and ASSIGNMENT.fullmatch(words[0]):
            del words[0]
        return tuple(words)


def pages() -> list[Path]:
    """What people read: every page but the fragments of the changelog, which are about things and not to be typed."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "compat" / "README.md"]
    found += (ROOT / "packages").glob("*/README.md")
    return sorted(path for path in found if "changes" not in path.parts)


def blocks(text: str, kind: str) -> list[str]:
    """The fenced blocks of one kind (none: an empty text), without their indentation."""
    found = (match for match in FENCE.finditer(text) if match["kind"] == kind)
    return [re.sub(rf"(?m)^{match['indent']}", "", match["text"]) for match in found]


def split(page: str, block: str) -> Iterator[Line]:
    """A block's commands; one that is open at the end of its line (a quote, a backslash) goes on in the next."""
    text = ""
    for piece in block.splitlines():
        text += piece
        if text.endswith("\\"):
            text = text[:-1] + " "
            continue
        try:
            words = shlex.split(text, comments=True)
        except ValueError:
            text += "\n"
            continue
        if words:
            yield Line(page, shlex.join(words), tuple(words))
        text = ""
    assert not text, f"{page}: this does not end: {text}"


def commands() -> list[Line]:
    """Every command of every page: what stands in blocks without a kind."""
    found: list[Line] = []
    for path in pages():
        name = str(path.relative_to(ROOT))
        for block in blocks(path.read_text(), ""):
            found += split(name, block)
    return found


def check_xkv(words: Sequence[str]) -> None:
    """Raise what the command line would say of these words, those after `xkv`; nothing is run."""
    command: Any = typer.main.get_command(cli.program((), OTHERS))
    context: Any = None
    rest, name = list(words), "xkv"
    while True:
        # Groups keep what belongs to their command; a command that is none of theirs is an error of this call.
        try:
            context = command.make_context(name, rest, parent=context)
        except typer.Exit:  # --help, --version: it has said what was asked for
            return
        if not isinstance(command, typer.core.TyperGroup):
            return
        rest = [*context._protected_args, *context.args]
        name, command, rest = cast("tuple[str, Any, list[str]]", command.resolve_command(context, rest))


def check_transfer_config(text: str) -> dict[str, Any]:
    """VLLM's `--kv-transfer-config`: it must be JSON, load our spec, and hold no key of ours that does not exist."""
    config: dict[str, Any] = json.loads(text)
    assert config["kv_connector"] in ("OffloadingConnector", "XkvOffloadingConnector")
    extra: dict[str, Any] = config["kv_connector_extra_config"]
    assert (extra["spec_name"], extra["spec_module_path"]) == ("XkvOffloadingSpec", "xkv_offload")
    own = {key for key in extra if key.startswith(OWN_KEY)}
    assert own <= {key.name for key in KEYS}, own
    return extra
