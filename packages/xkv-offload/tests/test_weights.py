"""Fingerprints: other weights are other fingerprints; what cannot be told is None."""

from pathlib import Path

import pytest

from xkv_offload import weights
from xkv_offload.weights import weights_fingerprint


def write(folder: Path, *, header: bytes = b"{}", body: bytes = b"\1" * 300_000) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + body)
    return folder


def test_the_same_files_elsewhere_are_the_same_weights(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one"), write(tmp_path / "two")
    assert weights_fingerprint(str(one), None, "auto") == weights_fingerprint(str(two), None, "auto") is not None


@pytest.mark.parametrize("at", [0, 8, 150_000, 299_999])
def test_a_changed_byte_in_small_files_is_seen(tmp_path: Path, at: int) -> None:
    body = bytearray(b"\1" * 300_000)
    body[at] = 2
    one, two = write(tmp_path / "one"), write(tmp_path / "two", body=bytes(body))
    assert weights_fingerprint(str(one), None, "auto") != weights_fingerprint(str(two), None, "auto")


def test_a_snapshot_is_its_commit(tmp_path: Path) -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    folder = write(tmp_path / "snapshots" / commit)
    assert weights_fingerprint(str(folder), None, "auto") == f"commit:{commit}"


def test_a_hub_name_is_its_revisions_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    refs = tmp_path / "hub" / "models--org--name" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text("a" * 40)
    assert weights_fingerprint("org/name", None, "auto") == "commit:" + "a" * 40
    assert weights_fingerprint("org/other", None, "auto") is None


def test_what_cannot_be_told_in_time_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "one")
    monkeypatch.setattr(weights, "SAMPLE_SECONDS_MAX", -1.0)
    assert weights_fingerprint(str(folder), None, "auto") is None
    assert weights_fingerprint(str(tmp_path), None, "auto") is None
    assert weights_fingerprint(str(tmp_path), None, "dummy") == "dummy"


def test_a_header_that_is_none_is_none(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    assert weights_fingerprint(str(tmp_path), None, "auto") is None
