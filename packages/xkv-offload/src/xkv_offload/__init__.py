"""xkv for vLLM's OffloadingConnector: `XkvOffloadingSpec`.

Owns: the name under which vLLM finds the spec (`spec_module_path: xkv_offload`). vLLM imports this module in
its API server too, and forks: importing it starts no thread, opens no file and imports neither vLLM nor torch;
the spec's own module is imported when the class is asked for.
Must not know: anything else.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .spec import XkvOffloadingSpec

__all__ = ["XkvOffloadingSpec", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name == "XkvOffloadingSpec":
        from .spec import XkvOffloadingSpec  # noqa: PLC0415 - it imports vLLM

        return XkvOffloadingSpec
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
