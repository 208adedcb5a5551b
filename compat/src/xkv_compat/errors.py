"""Errors of feature detection, by remedy.

Owns: what is raised when a vLLM lacks what is needed, is broken, or is not there at all.
Must not know: the probe table and its readers.
"""

from __future__ import annotations

__all__ = ["BadInput", "BrokenVLLM", "CompatError", "UnsupportedVLLM"]


class CompatError(Exception):
    """Whatever this package raises on purpose; ``str()`` is for the user, and says what to do."""


class UnsupportedVLLM(CompatError):  # noqa: N818 - the name is the product's interface
    """A vLLM lacks what the product cannot do without; lists every missing symbol at once.

    Attributes:
        missing: one line for each thing that is needed and was not found.
        where: the installed vLLM's version text, or the folder of a source tree.
    """

    def __init__(self, missing: tuple[str, ...], where: str) -> None:
        super().__init__(missing, where)
        self.missing = missing
        self.where = where

    def __str__(self) -> str:
        lines = "\n".join(f"  - {line}" for line in self.missing)
        return (
            f"vLLM ({self.where}) lacks {len(self.missing)} symbol(s) that are needed:\n{lines}\n"
            "Use a vLLM that has the KV offloading framework (vllm/v1/kv_offload), or vendor an adapted copy."
        )


class BrokenVLLM(CompatError):  # noqa: N818 - as above
    """A module of vLLM is there but cannot be used: it does not import, or does not parse.

    Attributes:
        module: the module's dotted name.
        reason: the cause in one line (for a file: path and line number).
    """

    def __init__(self, module: str, reason: str) -> None:
        super().__init__(module, reason)
        self.module = module
        self.reason = reason

    def __str__(self) -> str:
        return f"vLLM's module {self.module} is there but broken: {self.reason}"


class BadInput(CompatError):  # noqa: N818 - as above
    """What was given is not what it should be (no vLLM tree, no vLLM installed); one line.

    Attributes:
        text: what is wrong and what to do.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return self.text
