"""vLLM's OffloadingConnector with our ways of hearing of failed loads, for `kv_connector_module_path`.

Owns: `XkvOffloadingConnector`. With it vLLM's own class stays as it is; without it, `spec` puts the same methods there.
Must not know: what fails, and how it is noticed.
"""

from typing import Any

from xkv_compat.features import detect_live
from xkv_compat.vllm_symbols import offloading_connector_class

from . import steps
from .failures import method_names, methods
from .reports import failure_log, step_observer

_Connector: Any = offloading_connector_class()


class XkvOffloadingConnector(_Connector):  # type: ignore[misc]  # vLLM's class is Any here
    """OffloadingConnector that reports xkv's failed loads. Any other spec works in it as in vLLM's."""


for _name, _method in methods(
    {name: getattr(_Connector, name) for name in method_names(detect_live())}, failure_log
).items():
    setattr(XkvOffloadingConnector, _name, _method)
steps.attach(XkvOffloadingConnector, step_observer)
