"""The lock of a card's folder: one holder at a time, named; dropped by the kernel with its process."""

import multiprocessing
import os
from pathlib import Path

import pytest

from xkv_store.card_lock import CardInUseError, lock_folder
from xkv_store.errors import UserError


def _hold_and_die(folder: Path) -> None:
    lock_folder(folder, create=True)
    os._exit(9)


def test_the_second_is_told_who_holds_it(tmp_path: Path) -> None:
    fd = lock_folder(tmp_path / "card", create=True)
    with pytest.raises(CardInUseError, match=f"process {os.getpid()}"):
        lock_folder(tmp_path / "card", create=True)
    os.close(fd)
    os.close(lock_folder(tmp_path / "card", create=False))


def test_a_dead_holder_holds_nothing(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_hold_and_die, args=(tmp_path,))
    process.start()
    process.join(30)
    assert process.exitcode == 9
    os.close(lock_folder(tmp_path, create=False))


def test_a_folder_that_is_not_there_or_no_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no card"):
        lock_folder(tmp_path / "none", create=False)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot use"):
        lock_folder(tmp_path / "file", create=True)


def test_nobody_is_told_to_take_from_others_what_they_are_to_have(tmp_path: Path) -> None:
    """A device, and a folder like /tmp: without others' right to write, much else on the machine does not run."""
    with pytest.raises(UserError, match="Not a directory"):
        lock_folder(Path(os.devnull), create=False)
    everybodys = tmp_path / "everybodys"
    everybodys.mkdir()
    everybodys.chmod(0o1777)
    with pytest.raises(UserError, match=r"mode 1777.*; give a folder of its own"):
        lock_folder(everybodys, create=True)
    everybodys.chmod(0o777)
    with pytest.raises(UserError, match=f"type: chmod go-w {everybodys}"):
        lock_folder(everybodys, create=True)
