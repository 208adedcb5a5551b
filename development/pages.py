"""The site's pages, put together from what the repository has: README, docs/, decisions, changes and the matrix's data.

Owns: which pages there are and in which order, where a link leads on the site, and the pages that are generated.
Must not know: what makes HTML of them (`site`), or how a feature is found.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from development.changelog import CHANGELOG, unreleased
from development.places import ROOT
from xkv_compat.probes import FEATURES
from xkv_matrix.check import Places, load_expected
from xkv_matrix.page import table_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from xkv_matrix.targets import Target

__all__ = ["SECTIONS", "assemble", "compatibility", "prose", "site_pages"]

SECTIONS: Final = {
    "Using it": ("quickstart", "concepts", "configuration", "operations", "doctor", "why", "metrics",
                 "kubernetes", "failures", "compatibility", "performance", "remote", "scale"),
    "How it works": ("architecture", "identity", "format", "protocol", "reliability", "security"),
    "Releases and forks": ("matrix", "vendoring"),
    "The project": ("contributing", "changes", "decisions"),
}  # fmt: skip
# Pages that lie elsewhere in the repository, or are made here; all others are docs/NAME.md.
ELSEWHERE: Final = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", CHANGELOG: "changes.md",
                    "docs/adr": "decisions.md"}  # fmt: skip
FRAGMENTS: Final = PurePosixPath("docs/changes")  # they are in changes.md
FILES: Final = "files"  # what a page links to that is no page
_FENCED: Final = re.compile(r"(?ms)^( *)(```+|~~~+).*?^\1\2 *$\n?")
_CODE: Final = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)
_LINK: Final = re.compile(r"(!?\[[^\]]*\])\(([^()\s]+)\)")


def prose(text: str) -> Iterator[tuple[bool, str]]:
    """Give a page's parts in order: (True, what is read as text) and (False, what is code)."""
    place = 0
    spans = [match.span() for match in _FENCED.finditer(text)]
    for start, end in spans:
        yield from _inline(text[place:start])
        yield False, text[start:end]
        place = end
    yield from _inline(text[place:])


def _inline(text: str) -> Iterator[tuple[bool, str]]:
    place = 0
    for match in _CODE.finditer(text):
        yield True, text[place : match.start()]
        yield False, match[0]
        place = match.end()
    yield True, text[place:]


def site_pages(root: Path = ROOT) -> dict[str, str]:
    """Give where each page of the repository is on the site, by its place there."""
    pages = {name: place for name, place in ELSEWHERE.items() if (root / name).exists()}
    for path in sorted((root / "docs").rglob("*.md")):
        name = PurePosixPath(path.relative_to(root).as_posix())
        if FRAGMENTS not in name.parents:
            pages[str(name)] = str(name.relative_to("docs"))
    return pages


class _Assembly:
    """One site's sources in the making."""

    def __init__(self, root: Path, into: Path) -> None:
        self.root, self.into = root, into
        self.pages = site_pages(root)
        self.faults: list[str] = []

    def put(self, place: str, text: str) -> None:
        path = self.into / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def rewritten(self, name: str, text: str, place: str) -> str:
        """Give a page of the repository with its links as they are from its place on the site."""

        def link(match: re.Match[str]) -> str:
            target = self._target(name, match[2], place)
            return f"{match[1]}({target})"

        return "".join(_LINK.sub(link, part) if is_text else part for is_text, part in prose(text))

    def _target(self, name: str, link: str, place: str) -> str:
        if re.match(r"[a-z]+:", link):
            self.faults.append(f"{name}: {link}: a link out of the repository cannot be checked")
            return link
        path, _, anchor = link.partition("#")
        if not path:
            return link
        found = os.path.normpath(PurePosixPath(name).parent / path)
        here = self.pages.get(found)
        if here is None:
            source = self.root / found
            if found.startswith("..") or not source.is_file():
                self.faults.append(f"{name}: {link}: there is no such page or file")
                return link
            here = found.removeprefix("docs/") if found.startswith("docs/") else f"{FILES}/{found}"
            (self.into / here).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, self.into / here)
        target = os.path.relpath(here, PurePosixPath(place).parent)
        return f"{target}#{anchor}" if anchor else target


def _tree(title: str, pages: Iterable[str]) -> str:
    return "\n".join(("```{toctree}", ":hidden:", f":caption: {title}", "", *pages, "```", ""))


def _changes(root: Path) -> str:
    """Give the changelog with what has not been released."""
    text = (root / CHANGELOG).read_text()
    text = re.sub(r"<a id='[^']*'></a>\n", "", text)
    fresh = unreleased(root)
    entry = f"## Not yet released\n\n{fresh}\n" if fresh else ""
    return text.replace("<!-- scriv-insert-here -->\n", entry)


def _decisions(root: Path) -> str:
    names = sorted(path.stem for path in (root / "docs" / "adr").glob("*.md"))
    listed = "\n".join(("```{toctree}", ":maxdepth: 1", "", *(f"adr/{name}" for name in names), "```"))
    return f"# Decisions\n\nChoices that are hard to take back, each with its reasons.\n\n{listed}\n"


def compatibility(readme: str, targets: Sequence[Target], places: Places) -> str:
    """Give the page on releases: the README's table, and each row's features from what is committed for it."""
    rows = sorted(targets, key=lambda target: target.order)
    tables = [load_expected(places.table(target)).features for target in rows]
    lines = [
        "# Compatibility",
        "",
        "xkv asks a vLLM which features its offloading framework has, and never for its version. How each release",
        "fares is what the release gate says ([the matrix](matrix.md)); a fork is judged by its sources",
        "([vendoring](vendoring.md)).",
        "",
        *table_of(readme).splitlines()[1:-1],
        "",
        "## Features by release",
        "",
        "What `python -m xkv_compat report` finds in each, and what xkv does with it or without it.",
        "",
        f"| feature | {' | '.join(target.release.rpartition('.')[0] for target in rows)} | with it | without it |",
        f"| --- |{' :-: |' * len(rows)} --- | --- |",
    ]
    for feature in FEATURES:
        marks = " | ".join("●" if table.get(feature.name) else "○" for table in tables)
        lines.append(f"| `{feature.name}` | {marks} | {_cell(feature.present)} | {_cell(feature.absent)} |")
    return "\n".join((*lines, ""))


def _cell(text: str) -> str:
    """Give free text as a cell: none of it is markup."""
    return re.sub(r"([\\|<>*_`\[\]])", r"\\\1", text)


def assemble(into: Path, targets: Sequence[Target], root: Path = ROOT, places: Places | None = None) -> list[str]:
    """Write the site's sources into a folder; what is wrong with them, as lines."""
    making = _Assembly(root, into)
    made = {"docs/adr": _decisions(root), CHANGELOG: _changes(root)}
    readme = (root / "README.md").read_text()
    making.pages["docs/compatibility.md"] = "compatibility.md"
    for name, place in making.pages.items():
        if name == "docs/compatibility.md":
            text = compatibility(readme, targets, places or Places())
        else:
            text = made[name] if name in made else making.rewritten(name, (root / name).read_text(), place)
        if name == "README.md":
            text += "\n" + "\n".join(_tree(title, pages) for title, pages in SECTIONS.items())
        making.put(place, text)
    return making.faults
