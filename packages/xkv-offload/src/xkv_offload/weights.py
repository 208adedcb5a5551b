"""Which weights a model has.

Owns: the fingerprint of a model's weights: a hub snapshot's commit, else the headers and sampled bytes of the
safetensors files, else a constant for dummy weights; bounded in time.
Must not know: vLLM, the namespace.
"""

import hashlib
import os
import re
import time
from pathlib import Path

SAMPLE_SECONDS_MAX = 2.0  # at start-up, on rank 0: beyond it the weights count as undetermined
SAMPLES_PER_FILE = 16
SAMPLE_BYTES = 64 * 1024
HEADER_BYTES_MAX = 64 * 1024 * 1024  # a safetensors header beyond this is no header
_COMMIT = re.compile(r"[0-9a-f]{40}")


def weights_fingerprint(model: str, revision: str | None, load_format: str) -> str | None:
    """The fingerprint of `model` (a path or a hub name), or None where it cannot be determined in time."""
    if load_format == "dummy":
        return "dummy"
    folder = Path(model)
    if not folder.is_dir():
        commit = _hub_commit(model, revision or "main")
        return f"commit:{commit}" if commit else None
    for part in (folder, folder.resolve()):
        if part.parent.name == "snapshots" and _COMMIT.fullmatch(part.name):
            return f"commit:{part.name}"
    return _sampled(folder)


def _hub_commit(name: str, revision: str) -> str | None:
    """The commit that a hub name's revision stands for in the local hub folder (layout: huggingface_hub's docs)."""
    if _COMMIT.fullmatch(revision):
        return revision
    home = os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    ref = hub / ("models--" + name.replace("/", "--")) / "refs" / revision
    try:
        commit = ref.read_text().strip()
    except OSError:
        return None
    return commit if _COMMIT.fullmatch(commit) else None


def _sampled(folder: Path) -> str | None:
    """Digest of names, sizes, safetensors headers and bytes sampled at fixed places of the weight files."""
    deadline = time.monotonic() + SAMPLE_SECONDS_MAX
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt"))
    if not files:
        return None
    digest = hashlib.sha256()
    try:
        for path in files:
            if not _sample_file(path, digest, deadline):
                return None
    except OSError:
        return None
    return "sampled:" + digest.hexdigest()


def _sample_file(path: Path, digest: "hashlib._Hash", deadline: float) -> bool:
    size = path.stat().st_size
    digest.update(f"{path.name}\0{size}\0".encode())
    with path.open("rb") as file:
        head = file.read(8)
        if path.suffix == ".safetensors" and len(head) == 8:
            length = int.from_bytes(head, "little")
            if length > min(size, HEADER_BYTES_MAX):
                return False
            digest.update(file.read(length))
        step = max(size // SAMPLES_PER_FILE, 1)
        for offset in range(0, size, step):
            if time.monotonic() > deadline:
                return False
            file.seek(offset)
            digest.update(file.read(SAMPLE_BYTES))
        file.seek(max(size - SAMPLE_BYTES, 0))
        digest.update(file.read(SAMPLE_BYTES))
    return True
