"""The environment that an engine is started with: the hash seed, and PyTorch's allocator.

Owns: reading these variables, of this process or another, and what each value means.
Must not know: other variables, how features are found.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from xkv_compat.vllm_symbols import has_default_seed
from xkv_store.doctor.findings import Finding, fault, note, ok, warning
from xkv_store.errors import UserError

SEED = "PYTHONHASHSEED"
SEED_MAX = 2**32 - 1  # Python's
ALLOCATOR_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""The first is vLLM's own question; PyTorch takes the second, which is newer, for the same, and the last on ROCm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Variables and their values; `seed` None: not set."""

    seed: str | None
    allocator: Mapping[str, str]


def gather_environment(pid: int | None = None, proc: Path = Path("/proc")) -> Environment:
    """The variables of a process, as it was started (None: this one, as it is). Raises UserError."""
    variables: Mapping[str, str] = os.environ
    if pid is not None:
        try:
            raw = (proc / str(pid) / "environ").read_bytes()
        except OSError as error:
            raise UserError(
                f"--pid {pid}: its environment cannot be read ({error.strerror}); run this as that process's user"
            ) from error
        pairs = (entry.partition("=") for entry in os.fsdecode(raw).split("\0"))
        variables = {name: value for name, _, value in pairs}
    return Environment(
        seed=variables.get(SEED), allocator={name: variables[name] for name in ALLOCATOR_NAMES if name in variables}
    )


def examine_seed(environment: Environment, features: Mapping[str, bool] | None, hash_algorithm: str) -> Finding:
    """Whether block hashes are the same in the next launch. `features`: None where no vLLM was found."""
    seed = environment.seed
    remedy = f"export {SEED}=0, before the engine starts; the same for all that are to share what they store"
    if seed is not None and seed not in {"", "random"} and not _is_number(seed):
        what = f"{SEED} is {seed!r}, which Python does not take: it is a number from 0 to {SEED_MAX}"
        return fault("hash seed", what, "Python refuses to start with it", remedy)
    if seed is not None and _is_number(seed):
        return ok("hash seed", f"{SEED}={seed}: block hashes are the same in every launch")
    if seed is not None:
        what = f"{SEED} is {seed!r}, which vLLM takes as it stands, and Python as no seed at all"
        return warning("hash seed", what, "engines share what they store only with engines that have the same", remedy)
    unset = f"{SEED} is not set"
    if features is None:
        what = f"{unset}, and no vLLM was found to say whether it needs one"
        return warning("hash seed", what, "where it does, nothing that is stored is hit after a restart", remedy)
    if has_default_seed(features, hash_algorithm):
        return ok("hash seed", f"{unset}; this vLLM seeds {hash_algorithm} by itself, always alike")
    why = (
        f"and this vLLM does not seed {hash_algorithm} by itself"
        if features["stable_none_hash_default"]
        else "and this vLLM begins each process with another root hash"
    )
    return fault("hash seed", f"{unset}, {why}", "nothing that is stored is hit after a restart", remedy)


def examine_allocator(environment: Environment) -> list[Finding]:
    """`expandable_segments`: vLLM refuses it beside any connector, and it moves pages that are being copied."""
    found = []
    for name, value in environment.allocator.items():
        settings = [one.strip().partition(":") for one in value.split(",")]
        if not any(key == "expandable_segments" and on.strip().lower() == "true" for key, _, on in settings):
            continue
        kept = ",".join("".join(one) for one in settings if one[0] != "expandable_segments")
        refuses = name == ALLOCATOR_NAMES[0]
        follows = (
            "vLLM refuses to start with a KV connector"
            if refuses
            else "vLLM does not ask for this name, and the allocator may move KV pages from under a connector's copies"
        )
        remedy = f"export {name}={kept}" if kept else f"unset {name}"
        found.append(fault("allocator", f"{name} has expandable_segments:True", follows, remedy))
    return found or [ok("allocator", "expandable_segments is off")]


def environment_note(pid: int | None) -> list[Finding]:
    """Whose variables these are, where it is not plain."""
    if pid is not None:
        return []
    return [note("environment", "variables are this shell's; an engine that runs: --pid PID")]


def _is_number(seed: str) -> bool:
    return seed.isascii() and seed.isdigit() and int(seed) <= SEED_MAX
