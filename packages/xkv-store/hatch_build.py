"""The part of the wheel's build that is not hatchling's: the optional library, where there is a C compiler.

Owns: whether the wheel holds the library, and what it is called then. Must not know: how it is compiled.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LIBRARY = "libxkv.so.2"


class LibraryHook(BuildHookInterface[Any]):
    """Without a compiler the wheel is for any platform, and Python does what the library would."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and tell hatchling; an editable install has the library beside the source."""
        root = Path(self.root)
        if version == "editable":
            self._build(root / "src" / "xkv_store" / LIBRARY)
            return
        self._scratch = tempfile.TemporaryDirectory()
        library = Path(self._scratch.name, LIBRARY)
        if self._build(library):
            build_data["force_include"][str(library)] = f"xkv_store/{LIBRARY}"
            build_data["pure_python"] = False
            # For every Python of this platform: it is loaded by ctypes, and knows nothing of Python.
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """The wheel has it now."""
        if version != "editable":
            self._scratch.cleanup()

    def _build(self, into: Path) -> bool:
        command = (sys.executable, str(Path(self.root, "native", "build.py")), str(into))
        return subprocess.run(command, check=False).returncode == 0
