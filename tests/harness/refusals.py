"""Shapes that our backend refuses at start-up on some releases.

Owns: which those are, by the feature, and what the start says then.
Must not know: what a test is about.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from xkv_compat.features import detect_live
from xkv_store.errors import UserError

if TYPE_CHECKING:
    from harness.rig import Rig
    from harness.shapes import Shape


def refused(rig: Rig, shape: Shape) -> bool:
    """Whether this release may not have this shape: states beside other groups. If so, a start has shown it.

    To be asked before anything is launched.
    """
    beside = len(shape.groups) > 1 and any(group.kind == "mamba" for group in shape.groups)
    if not beside or detect_live()["state_hits_agree"]:
        return False
    with pytest.raises(UserError, match="Mamba layers beside other layers are refused on this vLLM"):
        rig.launch(shape)
    assert rig.gateway.status()["engines"] == 0, "refused before anything is attached"
    return True
