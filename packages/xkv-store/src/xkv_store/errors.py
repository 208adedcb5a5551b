"""Errors, told apart by what whoever catches them must do.

Owns the exception classes. Must not know where they are raised. All of them can be pickled.

- `UserError`: a configuration or a command; its text says what to type.
- `PeerError`: the other end of a session broke the protocol; drop the session.
- `MediumError`: a device or file failed; the object is a miss, counted. `CorruptObject` is its special case.
"""

import errno as errno_names
import os
from typing import TypeVar

Error = TypeVar("Error", bound=Exception)

LACKING = frozenset(
    {
        errno_names.ENOSPC,
        errno_names.EDQUOT,
        errno_names.EROFS,
        errno_names.EMFILE,
        errno_names.ENFILE,
        errno_names.ENOMEM,
    }
)
"""Errors that say that something is lacking just now, and nothing of what lies on the medium."""


class XkvError(Exception):
    """What every error that is not our own bug derives from."""


class UserError(XkvError):
    """Wrong configuration or use; the text names what is wrong and what to do."""


class PeerError(XkvError):
    """The peer broke the protocol, or sent bytes that are none; its session ends, other sessions go on."""


class MediumError(XkvError):
    """A medium (device, file or index) failed. The object concerned is a miss.

    `errno` is the system's error number (0 when there is none), `what` what was tried and on what,
    `remedy` what a person can do about it.
    """

    def __init__(self, errno: int, what: str, remedy: str = "") -> None:
        super().__init__(errno, what, remedy)
        self.errno = errno
        self.what = what
        self.remedy = remedy

    @classmethod
    def of(cls, error: OSError, what: str, remedy: str = "") -> "MediumError":
        """The medium's error for the system's `error`."""
        return cls(error.errno or 0, what, remedy or _REMEDIES.get(error.errno or 0, ""))

    def __str__(self) -> str:
        reason = f": {os.strerror(self.errno)}" if self.errno else ""
        remedy = f" ({self.remedy})" if self.remedy else ""
        return f"{self.what}{reason}{remedy}"


class CorruptObject(MediumError):  # noqa: N818 -- the object is the news; the base class says Error
    """Bytes were read that are not those of the object asked for: torn, mixed, short or damaged."""

    def __init__(self, what: str, errno: int = errno_names.EBADMSG, remedy: str = "") -> None:
        super().__init__(errno, what, remedy)

    def __reduce__(self) -> tuple[type["CorruptObject"], tuple[str, int, str]]:
        return (type(self), (self.what, self.errno, self.remedy))

    def __str__(self) -> str:
        return self.what


class OtherObject(CorruptObject):
    """The bytes are sound, and another object's: what led to them (an index entry, a write that was lost) is wrong."""


class SpoiltSlots(MediumError):  # noqa: N818 -- as above
    """An object is sound on the medium, and what is in its reader's memory is not it: somebody has written there."""


class RemoteGoneError(XkvError):
    """The remote does not have, or not as it was believed to be, an object that a card of the remote alone lists."""


class RemoteAwayError(XkvError):
    """The remote does not answer just now, which says nothing of the object."""


def without_trace(error: Error) -> Error:
    """The error, to be kept: its traces, and its causes', are taken off.

    They know all that was being moved and, where whoever keeps the error is among that, keep it until some garbage
    collection: an engine's ring, gigabytes, long after the engine has gone.
    """
    one: BaseException | None = error
    while one is not None:
        one.__traceback__ = None
        one = one.__cause__ or one.__context__
    return error


_REMEDIES = {
    errno_names.ENOSPC: "free some space on that file system",
    errno_names.EDQUOT: "raise the quota, or free some space",
    errno_names.EIO: "the device reports errors: look at the kernel's log, and replace it",
    errno_names.EROFS: "the file system is read-only: mount it for writing",
}
