"""A real vLLM on a GPU stores through xkv, ends, and another process restores: same tokens as a GPU prefix hit.

So does one that has slept and is awake again, with torch's memory in expandable segments (vLLM allows them then only).
Owns: a check that needs a GPU and vLLM's CUDA build (CI has neither). Prints one JSON line last.
Must not know: releases; it takes the vLLM that is importable.

    PYTHONHASHSEED=0 VLLM_USE_FLASHINFER_SAMPLER=0 python bench/gpu_engine_check.py FOLDER
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 2_820  # a hit in GPU memory is then of whole chunks, too: another length may give other tokens
NEW_TOKENS = 32
PHASE_S_MAX = 200
ASKED = {"store": 2, "sleep": 5}  # how often; else once


def make_model(folder: Path) -> None:
    """A small Llama with random weights large enough that output depends on every page."""
    import torch  # noqa: PLC0415 - only the child that makes the model needs it
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - as above

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=4096,
        max_position_embeddings=8192,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def phase(folder: Path, name: str) -> dict[str, Any]:
    """One engine in this process: `store` asks twice (cold, GPU hit), `restore` once, `canary` with zeroed pages.

    `sleep`: cold, hit, then, after it has slept, cold again (its caches went), hit, and restored.
    """
    from vllm import LLM, SamplingParams  # noqa: PLC0415 - only the children load vLLM

    from xkv_offload.copy import End, Move  # noqa: PLC0415 - as above
    from xkv_offload.device_copy import DeviceMover  # noqa: PLC0415 - as above
    from xkv_offload.metrics import PROCESS_COUNTERS  # noqa: PLC0415 - as above
    from xkv_store.geometry import HEADER_BYTES  # noqa: PLC0415 - as above

    if name == "canary":
        genuine = DeviceMover.start_scatter

        def zeroed(self: DeviceMover, move: Move, mark: object, end: End) -> None:
            for slot in move.slots:
                slot[HEADER_BYTES:] = 0
            genuine(self, move, mark, end)

        DeviceMover.start_scatter = zeroed  # type: ignore[method-assign]
    extra = {
        "spec_name": "XkvOffloadingSpec",
        "spec_module_path": "xkv_offload",
        "blocks_per_chunk": 16,
        "xkv.path": str(folder / "card"),
        "xkv.socket_dir": str(folder / "sockets"),
        "xkv.capacity_bytes": 4 << 30,
        "xkv.linger_s": 300.0,
        "xkv.connect_timeout_ms": 30_000,
    }
    llm = LLM(
        model=str(folder / "model"),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        block_size=16,
        max_model_len=4096,
        gpu_memory_utilization=0.2,
        enable_sleep_mode=name == "sleep",
        kv_transfer_config={
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        },
    )
    seed = 11 if name == "sleep" else 7  # that one's first answer is not to be restored
    prompt = [(seed * i * i + 3 * i) % 4096 for i in range(PROMPT_TOKENS)]
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, detokenize=False, ignore_eos=True)
    runs = []
    for number in range(ASKED.get(name, 1)):
        if name == "sleep" and number == 2:
            llm.sleep(level=1)
            llm.wake_up()
        elif name == "sleep" and number == 4:
            llm.reset_prefix_cache()
        started = time.monotonic()
        output = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]
        runs.append(
            {
                "tokens": list(output.outputs[0].token_ids),
                "cached": output.num_cached_tokens,
                "seconds": round(time.monotonic() - started, 3),
            }
        )
        time.sleep(1.0)  # the last stores are confirmed meanwhile
    return {"runs": runs, "counters": {k: v for k, v in PROCESS_COUNTERS.items() if v}}


def run_child(folder: Path, name: str) -> dict[str, Any]:
    """The phase in a process of its own; its result is the last line of its output."""
    command = [sys.executable, __file__, str(folder), name]
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    if name == "sleep":
        environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    done = subprocess.run(command, capture_output=True, text=True, timeout=PHASE_S_MAX, env=environment, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        sys.exit(f"phase {name} failed:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return result


def main(folder: Path) -> None:
    """Model, then each phase in its own process."""
    folder.mkdir(parents=True, exist_ok=True)
    run_child(folder, "model")
    phases = {name: run_child(folder, name) for name in ("store", "restore", "sleep", "canary")}
    for name, one in phases.items():
        print(f"{name:<10}", one["counters"], [(run["cached"], run["seconds"]) for run in one["runs"]])
        assert name == "store" or one["counters"]["load_objects"] > 0
    _, hit = phases["store"]["runs"]
    *before, computed, own_hit, restored = phases["sleep"]["runs"]
    assert own_hit["tokens"] == before[1]["tokens"]
    (again,), (spoilt,) = (phases[name]["runs"] for name in ("restore", "canary"))
    result = {
        "identical": again["tokens"] == hit["tokens"],
        "identical_after_sleep": computed["cached"] == 0 < restored["cached"] == own_hit["cached"]
        and restored["tokens"] == own_hit["tokens"],
        "canary_differs": spoilt["tokens"] != hit["tokens"],
        "restored_tokens": again["cached"],
        "distinct_tokens": len(set(hit["tokens"])),
    }
    print(json.dumps(result))
    if not all(result.values()):
        sys.exit(1)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(Path(sys.argv[1]))
    elif sys.argv[2] == "model":
        make_model(Path(sys.argv[1]) / "model")
        print("RESULT {}")
    else:
        print("RESULT " + json.dumps(phase(Path(sys.argv[1]), sys.argv[2])), flush=True)
        os._exit(0)  # an engine's threads need not be waited for
