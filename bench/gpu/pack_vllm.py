#!/usr/bin/env python3
"""Pack vLLM 0.26.0 (CUDA) for a GPU machine that reaches no network.

Owns: three folders of at most 60 MB each under the folder named on the command
line: `deps` (wheels that such a machine lacks beside torch 2.11 + CUDA 13),
`native` (vLLM's C extension) and `python` (the rest, without the parts that a
Hopper card and dense models do not need). Downloads by package name with pip.

    python pack_vllm.py OUT            # then on the GPU machine:
    pip install --no-index --no-deps --target SITE OUT/deps/*.whl
    python -m zipfile -e OUT/native/native.zip SITE
    python -m zipfile -e OUT/python/python.zip SITE
    PYTHONPATH=SITE VLLM_USE_FLASHINFER_SAMPLER=0 python your_program.py
"""

import subprocess
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
(REQUIREMENTS,) = HERE.glob("requirements-vllm-*.txt")
VERSION = REQUIREMENTS.stem.removeprefix("requirements-vllm-")
PLATFORMS = ("2_31", "2_28", "2_27", "2_24", "2_17", "2_12")
NATIVE = "vllm/_C_stable_libtorch.abi3.so"
LEFT_OUT = ("vllm/vllm-rs", "vllm/_moe_C", "vllm/vllm_flash_attn/_vllm_fa2_C", "vllm/third_party/deep_gemm/_C")


def download(requirement: str, folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--only-binary=:all:",
        "--python-version",
        "3.12",
        "--implementation",
        "cp",
        "-d",
        str(folder),
        requirement,
    ]
    for p in PLATFORMS:
        command += ["--platform", f"manylinux_{p}_x86_64"]
    command += ["--platform", "manylinux2014_x86_64", "--platform", "manylinux1_x86_64"]
    if subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode:
        # some wheels carry one newer tag alone, which pip matches only by itself
        for p in PLATFORMS:
            one = [*command[: command.index("--platform")], "--platform", f"manylinux_{p}_x86_64"]
            if not subprocess.run(one, stderr=subprocess.DEVNULL, check=False).returncode:
                return
        raise SystemExit(f"no wheel found for {requirement}")


def main(out: Path) -> None:
    for name in ("deps", "native", "python", "wheel"):
        (out / name).mkdir(parents=True, exist_ok=True)
    for line in REQUIREMENTS.read_text().split():
        download(line, out / "deps")
    download(f"vllm=={VERSION}", out / "wheel")
    (wheel,) = (out / "wheel").glob("vllm-*.whl")
    with (
        zipfile.ZipFile(wheel) as src,
        zipfile.ZipFile(out / "native/native.zip", "w", zipfile.ZIP_DEFLATED) as native,
        zipfile.ZipFile(out / "python/python.zip", "w", zipfile.ZIP_DEFLATED) as rest,
    ):
        for entry in src.infolist():
            if entry.filename.endswith((".so", "vllm-rs")) and entry.filename.startswith(LEFT_OUT):
                continue
            (native if entry.filename == NATIVE else rest).writestr(entry.filename, src.read(entry))
    for name in ("deps", "native", "python"):
        size = sum(f.stat().st_size for f in (out / name).iterdir())
        print(f"{name}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
