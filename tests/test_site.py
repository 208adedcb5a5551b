"""The site: a page that nobody finds, or a link that leads nowhere, must not pass.

Owns: how pages are put together, and the judgement on HTML made by hand. Must not know: Sphinx; `nox -s docs` has it.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from xml.etree import ElementTree as ET

import pytest

from development import pages, site
from development.places import ROOT, targets
from xkv_compat.probes import FEATURES
from xkv_matrix.page import table_of

README = """# a

[one](docs/one.md) [place](docs/one.md#b) [decisions](docs/adr) `[code](nowhere.md)` [file](LICENSE)
![picture](docs/p.svg)

```
[fenced](nowhere.md)
```
"""


def _put(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    _put(
        folder,
        README_dot_md=README,
        CONTRIBUTING_dot_md="# c\n",
        CHANGELOG_dot_md="# Changes\n\n<!-- scriv-insert-here -->\n\n<a id='changelog-1'></a>\n## 1 (then)\n",
        LICENSE="licence",
        docs__one_dot_md="# b\n\n[back](../README.md) [adr](adr/1.md)\n",
        docs__p_dot_svg="<svg/>",
        docs__adr__1_dot_md="# decided\n\n[one](../one.md)\n",
    )
    (folder / "docs" / "changes").mkdir()
    (folder / "docs" / "changes" / "1-it.md").write_text("It is new: [not a page](nowhere.md)\n")
    table = table_of((ROOT / "README.md").read_text())  # the part that the release gate owns
    (folder / "README.md").write_text(f"{README}\n{table}\n")
    return folder


def test_links_lead_where_the_pages_are_on_the_site(root: Path, tmp_path: Path) -> None:
    into = tmp_path / "site"
    assert pages.assemble(into, targets(), root) == []
    index = (into / "index.md").read_text()
    assert "[one](one.md) [place](one.md#b) [decisions](decisions.md)" in index
    assert "`[code](nowhere.md)` [file](files/LICENSE)\n![picture](p.svg)" in index
    assert "[fenced](nowhere.md)" in index
    assert (into / "files" / "LICENSE").read_text() == "licence"
    assert "[back](index.md) [adr](adr/1.md)" in (into / "one.md").read_text()
    assert "[one](../one.md)" in (into / "adr" / "1.md").read_text()
    assert "adr/1" in (into / "decisions.md").read_text()


def test_what_is_not_released_stands_before_what_is(root: Path, tmp_path: Path) -> None:
    pages.assemble(tmp_path / "site", targets(), root)
    text = (tmp_path / "site" / "changes.md").read_text()
    assert text.index("## Not yet released") < text.index("It is new") < text.index("## 1 (then)")
    assert "<a id" not in text


@pytest.mark.parametrize("link", ["none.md", "../../outside.md", "docs", "https://example.org/x"])
def test_a_link_that_cannot_be_followed_is_a_fault(root: Path, tmp_path: Path, link: str) -> None:
    (root / "docs" / "one.md").write_text(f"# b\n\n[there]({link})\n")
    (fault,) = pages.assemble(tmp_path / "site", targets(), root)
    assert fault.startswith(f"docs/one.md: {link}: ")


# --- this repository's own --------------------------------------------------------------------------------


def test_every_page_has_a_place_in_the_navigation() -> None:
    named = {f"{name}.md" for names in pages.SECTIONS.values() for name in names}
    there = set(pages.site_pages().values()) | {"compatibility.md"}
    decisions = {place for place in there if PurePosixPath(place).parent.name == "adr"}
    assert named == there - decisions - {"index.md"}
    assert len(decisions) == len(list((ROOT / "docs" / "adr").glob("*.md")))


def test_our_pages_can_be_put_together(tmp_path: Path) -> None:
    rows = targets()
    assert pages.assemble(tmp_path, rows) == []
    text = (tmp_path / "compatibility.md").read_text()
    for row in rows:
        assert f"| {row.release} | {row.status} |" in text, "the README's table has it, and so must this page"
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(lines) == len(FEATURES)
    assert {line.count("●") + line.count("○") for line in lines} == {len(rows)}


def test_pictures_are_text_and_need_nothing_from_elsewhere() -> None:
    pictures = list((ROOT / "docs").rglob("*.svg"))
    assert pictures
    for path in pictures:
        tree = ET.parse(path)
        for node in tree.iter():
            assert not any("href" in name for name in node.attrib), path
            assert node.tag.rpartition("}")[2] not in {"script", "style", "image"}, path
        names = {node.tag.rpartition("}")[2] for node in tree.iter()}
        assert {"title", "desc"} <= names, "for those who do not see it"


# --- HTML -------------------------------------------------------------------------------------------------


def _site(folder: Path, body: str) -> list[str]:
    (folder / "a.html").write_text(f"<html><body>{body}</body></html>")
    (folder / "b.html").write_text('<h2 id="there">b</h2>')
    (folder / "p.svg").write_text("<svg/>")
    return list(site.html_faults(folder))


@pytest.mark.parametrize(
    "body",
    [
        '<a href="b.html#there">x</a><a href="b.html">x</a><a href="#">x</a><img src="p.svg?v=1">',
        '<a href="https://example.org">x</a> <a href="mailto:a@b">x</a>',
        "<pre>- typed\n| so |\n</pre><p>one - two | three</p><p><code>- x</code></p>",
    ],
)
def test_a_good_page_has_no_faults(tmp_path: Path, body: str) -> None:
    assert _site(tmp_path, body) == []


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ('<a href="c.html">x</a>', "leads nowhere"),
        ('<a href="../outside.html">x</a>', "leads nowhere"),
        ('<img src="q.svg">', "leads nowhere"),
        ('<a href="b.html#gone">x</a>', "no such place"),
        ('<a href="#gone">x</a>', "no such place"),
        ('<script src="https://example.org/x.js"></script>', "from elsewhere"),
        ('<link href="//example.org/x.css">', "from elsewhere"),
        ("<p>text\n- an item that is none</p>", "as it was typed"),
        ("<p>| a | table | that is none |</p>", "as it was typed"),
    ],
)
def test_what_is_wrong_with_a_page_is_said(tmp_path: Path, body: str, fault: str) -> None:
    (said,) = _site(tmp_path, body)
    assert said.startswith("a.html: ")
    assert fault in said


def test_a_site_without_pages_is_a_fault(tmp_path: Path) -> None:
    assert list(site.html_faults(tmp_path)) == ["there are no pages"]
