"""The pages as HTML: built by Sphinx without the network, every warning an error, every link followed.

Owns: how Sphinx is called, and what is asked of the HTML: links and anchors that are there, nothing from elsewhere.
Must not know: which pages there are (`pages`), sessions.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urldefrag

from development.pages import assemble
from development.places import targets

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["html_faults", "main"]

BUILD_S_MAX: Final = 300  # some ten seconds on a quiet machine
SETTINGS: Final = (
    "project=xkv",
    "extensions=myst_parser",
    "root_doc=index",
    "html_theme=alabaster",
    "html_theme_options.description=vLLM's KV cache on NVMe",
    "html_theme_options.fixed_sidebar=true",
    "html_theme_options.body_max_width=60em",
    "html_theme_options.page_width=80em",
    "html_show_sourcelink=0",
    "html_copy_source=0",
    "html_show_copyright=0",
    "myst_heading_anchors=3",
)
_LOADED: Final = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}
_BLOCKS: Final = {"p", "li", "td", "th", "h1", "h2", "h3"}
# Markup that was not understood as such stands in a paragraph as it was typed.
_RAW: Final = ("| ", "- ", "* ", "```", "## ")


def build(source: Path, into: Path) -> list[str]:
    """Run Sphinx; its warnings and errors, as lines."""
    settings = [word for setting in SETTINGS for word in ("-D", setting)]
    with tempfile.TemporaryDirectory() as scratch:
        command = (sys.executable, "-m", "sphinx", "-C", "-b", "html", "-q", "-n", "-W", "--keep-going", "-d", scratch)
        done = subprocess.run(
            (*command, *settings, str(source), str(into)),
            capture_output=True,
            text=True,
            timeout=BUILD_S_MAX,
            check=False,
            env={**os.environ, "NO_COLOR": "1", "LC_ALL": "C.UTF-8"},
        )
    said = [line.replace(f"{source}/", "") for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return said or ([f"sphinx ended with {done.returncode}"] if done.returncode else [])


@dataclass(slots=True)
class _Page:
    """What a page has: places that can be linked to, its links, what a browser loads with it, text that is markup."""

    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    raw: list[str] = field(default_factory=list)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.page = _Page()
        self._in_code = 0
        self._starts = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if "id" in given:
            self.page.anchors.add(given["id"])
        if tag == "a" and "href" in given:
            self.page.links.append(given["href"])
        if tag in _LOADED and _LOADED[tag] in given:
            self.page.loaded.append(given[_LOADED[tag]])
        self._in_code += tag in ("pre", "code", "script", "style")
        self._starts = tag in _BLOCKS

    def handle_endtag(self, tag: str) -> None:
        self._in_code -= tag in ("pre", "code", "script", "style")

    def handle_data(self, data: str) -> None:
        if self._in_code or not data.strip():
            return
        first, *others = data.splitlines()
        lines = [*([first] if self._starts else []), *others]
        self.page.raw += [line for line in lines if line.startswith(_RAW)]
        self._starts = False


def _read(path: Path) -> _Page:
    reader = _Reader()
    reader.feed(path.read_text())
    return reader.page


def _is_elsewhere(link: str) -> bool:
    return link.startswith("//") or ":" in link.split("/", maxsplit=1)[0].split("#", maxsplit=1)[0]


def html_faults(folder: Path) -> Iterator[str]:
    """Say which links of a built site lead nowhere, what it would load from elsewhere, what stands as it was typed."""
    pages = {path: _read(path) for path in sorted(folder.rglob("*.html"))}
    if not pages:
        yield "there are no pages"
    for path, page in pages.items():
        name = path.relative_to(folder)
        yield from (f"{name}: is loaded from elsewhere: {link}" for link in page.loaded if _is_elsewhere(link))
        yield from (f"{name}: stands there as it was typed: {line}" for line in page.raw)
        for link in (*page.links, *page.loaded):
            if not _is_elsewhere(link) and (fault := _leads_nowhere(path, link, pages, folder)):
                yield f"{name}: {link}: {fault}"


def _leads_nowhere(path: Path, link: str, pages: Mapping[Path, _Page], folder: Path) -> str:
    """Say what is wrong with a link of a page, or nothing."""
    place, anchor = urldefrag(unquote(link))
    target = path.parent / place.partition("?")[0] if place else path
    target = Path(os.path.normpath(target))
    if not target.is_relative_to(folder) or not target.is_file():
        return "leads nowhere"
    return "that page has no such place" if anchor and target in pages and anchor not in pages[target].anchors else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the site and say what is wrong with it, a line each; the exit code: 1 where anything is."""
    parser = argparse.ArgumentParser(prog="python -m development.site")
    parser.add_argument("--into", type=Path, required=True)
    into = parser.parse_args(arguments).into.resolve()
    shutil.rmtree(into, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch).resolve()
        wrong = assemble(source, targets())
        wrong += build(source, into)
    wrong += html_faults(into)
    sys.stdout.writelines(f"{line}\n" for line in wrong)
    if not wrong:
        count = len(list(into.rglob("*.html")))
        sys.stdout.write(f"{count} pages, no warning, every link leads somewhere: {into / 'index.html'}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
