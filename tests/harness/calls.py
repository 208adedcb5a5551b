"""Which of the release's lines really used our objects, noted while the harness's tests run.

Owns: subclasses of our spec, and of whatever it and its manager and worker hand out, that note each use which a
module of vLLM makes: role, name, module and line. Cheap enough to be always on.
Must not know: contracts, what a test is about.
"""

from __future__ import annotations

import sys
from functools import cache, partial
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from types import FrameType


class Made(NamedTuple):
    """A use that was made: of which attribute of an object of which role, and on which line of which module."""

    role: str
    name: str
    module: str
    line: int


MADE: set[Made] = set()  # of this process, by every harness test that ran in it

# What a method or an attribute of one role gives: an object of another, or several.
_GIVES = {
    ("spec", "get_manager"): "manager",
    ("spec", "get_worker"): "worker",
    ("spec", "get_handlers"): "worker",
    ("manager", "on_new_request"): "request_context",
    ("manager", "prepare_load"): "load_store_spec",
    ("manager", "prepare_store"): "store_output",
    ("store_output", "store_spec"): "load_store_spec",
    ("worker", "get_finished"): "transfer_result",
}


def recorded_spec(spec: Any) -> Any:
    """A subclass of our spec whose making, class attributes and objects are noted."""
    return _recorded_class(spec, "spec")


@cache
def _recorded_class(of: Any, role: str) -> Any:
    class Kind(type(of)):  # type: ignore[misc]  # vLLM's metaclass is Any here
        """The class itself: vLLM asks it for what it says of all its objects, and makes it."""

        def __getattribute__(cls, name: str) -> Any:
            return _used(role, name, super().__getattribute__(name), sys._getframe(1))

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            _note(role, "__init__", sys._getframe(1))
            return super().__call__(*args, **kwargs)

    return Kind(of.__name__, (_recorded(of, role),), {"__slots__": ()})


@cache
def _recorded(kind: Any, role: str) -> Any:
    """A subclass of `kind` that is laid out alike, and whose objects note what vLLM does with them."""

    def read(self: Any, name: str) -> Any:
        return _used(role, name, kind.__getattribute__(self, name), sys._getframe(1))

    return type(kind)(kind.__name__, (kind,), {"__slots__": (), "__getattribute__": read, "__qualname__": role})


def _watched(value: Any, role: str) -> Any:
    """`value`, or what it holds, as an object of `role` that notes its uses from now on."""
    if isinstance(value, list):
        return [_watched(one, role) for one in value]
    if role == "worker" and not isinstance(value, type) and _is_of_handlers(value):
        return [(*map(_watched_class, classes), _watched(handler, role)) for *classes, handler in value]
    if value is not None and type(value).__qualname__ != role:
        object.__setattr__(value, "__class__", _recorded(type(value), role))  # type: ignore[arg-type]  # a class is hashable
    return value


def _watched_class(spec: Any) -> Any:
    """What get_handlers says that a handler moves from or to: ours notes what it is asked."""
    return spec if spec.__module__.startswith("vllm.") else _recorded_class(spec, "load_store_spec")


def _is_of_handlers(value: Any) -> bool:
    """Whether it is what get_handlers gives, an iterator or a tuple of them."""
    return isinstance(value, tuple) or type(value).__name__ == "generator"


def _used(role: str, name: str, value: Any, caller: FrameType) -> Any:
    """Note a read, or hand out a method that notes when it is called."""
    if not _is_of_vllm(caller):
        return value
    if isinstance(value, MethodType | FunctionType):
        return partial(_call, role, name, value)
    _note(role, name, caller)
    given = _GIVES.get((role, name))
    return value if given is None else _watched(value, given)


def _call(role: str, name: str, method: Any, *args: Any, **kwargs: Any) -> Any:
    _note(role, name, sys._getframe(1))
    given = _GIVES.get((role, name))
    result = method(*args, **kwargs)
    return result if given is None else _watched(result, given)


def _is_of_vllm(caller: FrameType) -> bool:
    return str(caller.f_globals.get("__name__")).startswith("vllm.")


def _note(role: str, name: str, caller: FrameType) -> None:
    if _is_of_vllm(caller):
        MADE.add(Made(role, name, caller.f_globals["__name__"], caller.f_lineno))
