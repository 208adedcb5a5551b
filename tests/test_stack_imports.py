"""What a row says of its release: that this release is installed here, and that what it lists can be imported.

A stack that ran on another release than it says, or that an import silently left out, would be a pass for nothing.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import warnings

import pytest

from xkv_matrix.targets import find_target

pytestmark = pytest.mark.timeout(600)  # the first import of a release compiles thousands of modules

ROW = find_target(os.environ["XKV_TARGET"])


def test_the_row_s_release_is_installed() -> None:
    assert importlib.metadata.version(ROW.package) == ROW.version


@pytest.mark.parametrize("module", ROW.imports)
def test_importable(module: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's and torch's own: some releases compile functions when imported
        importlib.import_module(module)


def test_the_row_lists_something() -> None:
    assert ROW.imports
