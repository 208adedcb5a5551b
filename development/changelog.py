"""The step to a release: one version put wherever it stands, and the fragments of docs/changes/ made its changelog.

Owns: the places of the version, that a fragment is one, and calling scriv (its settings: pyproject.toml).
Must not know: what is in the archives (`distributions`), sessions.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Final

from development.distributions import VERSION, packages
from development.places import ROOT, refuse

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = ["CHANGELOG", "FRAGMENTS", "fragment_faults", "main", "set_version", "unreleased"]

CHANGELOG: Final = "CHANGELOG.md"
FRAGMENTS: Final = "docs/changes"
NAME: Final = re.compile(r"\d+-[a-z0-9]+(?:-[a-z0-9]+)*\.md")  # the issue, and what it is about


def _fragments(root: Path) -> list[Path]:
    """Give them in the order in which scriv takes them."""
    return sorted((root / FRAGMENTS).glob("*.md"))


def fragment_faults(root: Path = ROOT) -> Iterator[str]:
    """Say which files are no fragments: scriv would leave them out, or take a heading for a category."""
    folder = root / FRAGMENTS
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        text = path.read_text()
        if not NAME.fullmatch(path.name):
            yield f"{path.name}: a fragment is called ISSUE-what-it-is-about.md"
        elif not text.strip():
            yield f"{path.name}: says nothing"
        elif re.search(r"(?m)^#", text):
            yield f"{path.name}: a fragment has no headings"


def unreleased(root: Path = ROOT) -> str:
    """Give the fragments as they will stand in the changelog."""
    return "\n\n".join(path.read_text().strip() for path in _fragments(root))


def set_version(version: str, root: Path = ROOT) -> list[Path]:
    """Put a version into every package and into what they pin of each other; the files that were changed."""
    changed = []
    for package in packages(root):
        module, project = package.source / "__init__.py", package.folder / "pyproject.toml"
        texts = {
            module: VERSION.sub(f'__version__ = "{version}"', module.read_text()),
            project: re.sub(r'"(xkv-[a-z]+)==[^"]*"', rf'"\1=={version}"', project.read_text()),
        }
        for path, text in texts.items():
            if path.read_text() != text:
                path.write_text(text)
                changed.append(path)
    return changed


def main(arguments: Sequence[str] | None = None) -> int:
    """Without a version: print what the next release's entry will say. With one: make the release's changes."""
    parser = argparse.ArgumentParser(prog="nox -s changelog --", allow_abbrev=False)
    parser.add_argument("version", nargs="?", help="of the release that is to be made, for example 0.2.0")
    version = parser.parse_args(arguments).version
    for fault in fragment_faults():
        refuse(f"{FRAGMENTS}/{fault}")
    if version is None:
        sys.stdout.write(f"{unreleased()}\n")
        return 0
    if not VERSION.fullmatch(f'__version__ = "{version}"'):
        refuse(f"{version!r} is no version: type three numbers, for example 0.2.0, or 0.2.0rc1")
    if re.search(rf"(?m)^## {re.escape(version)} ", (ROOT / CHANGELOG).read_text()):
        refuse(f"{CHANGELOG} has {version} already: type the next one")
    for path in set_version(version):
        sys.stdout.write(f"{path.relative_to(ROOT)}: {version}\n")
    sys.stdout.flush()
    return subprocess.run((sys.executable, "-m", "scriv", "collect", "--no-add"), cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
