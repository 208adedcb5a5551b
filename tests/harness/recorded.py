"""The spec as the harness's engines load it: ours, with every use by vLLM noted.

Owns: the name under which vLLM finds it (`spec_module_path`).
Must not know: what is noted.
"""

from __future__ import annotations

from typing import Any

from harness.calls import recorded_spec
from xkv_offload.spec import XkvOffloadingSpec as _OurSpec

XkvOffloadingSpec: Any = recorded_spec(_OurSpec)
