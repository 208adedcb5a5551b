"""Errors cross process pools and logs: pickled without loss, with a remedy in the text."""

import errno
import os
import pickle

import pytest

from xkv_store.errors import CorruptObject, MediumError, PeerError, UserError, XkvError, without_trace


@pytest.mark.parametrize(
    "error",
    [
        UserError("type this"),
        PeerError("not a message"),
        MediumError(errno.EIO, "reading db-0.xkv", "replace it"),
        CorruptObject("wrong key"),
        CorruptObject("short", errno.EIO, "look"),
    ],
)
def test_pickles_without_loss(error: XkvError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_medium_error_names_reason_and_remedy() -> None:
    error = MediumError.of(OSError(errno.ENOSPC, "x"), "writing the index")
    assert error.errno == errno.ENOSPC
    assert str(error) == "writing the index: No space left on device (free some space on that file system)"


def test_corrupt_object_is_a_medium_error() -> None:
    assert isinstance(CorruptObject("x"), MediumError)


def test_an_error_that_is_kept_knows_nothing_of_where_it_was() -> None:
    def fails() -> None:
        try:
            os.close(-1)
        except OSError as cause:
            raise MediumError.of(cause, "reading") from cause

    with pytest.raises(MediumError) as caught:
        fails()
    kept = without_trace(caught.value)
    assert str(kept) == "reading: Bad file descriptor"
    assert isinstance(kept.__cause__, OSError)
    assert (kept.__traceback__, kept.__cause__.__traceback__) == (None, None)
