"""A real vLLM on a GPU: cold, a hit in GPU memory, restored; with xkv, with vLLM's own CPU offloading, with neither.

Owns: the figures of docs/performance.md that need a GPU and vLLM's CUDA build. One process for each engine.
Must not know: releases; it takes the vLLM that is importable. How one is brought to a machine without a network:
bench/gpu/pack_vllm.py.

    PYTHONHASHSEED=0 VLLM_USE_FLASHINFER_SAMPLER=0 python bench/gpu_engine.py FOLDER [--json FILE] [--engines ...]

FOLDER is where the card lies: on a tmpfs, the path is measured; on a disk, the disk.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

NEW_TOKENS = 2
RESTORES = 3
WEIGHT_SCALE = 35  # of vLLM's own, up to 0.001
PHASE_S_MAX = 280
GIB = 1 << 30
RING = {"xkv.ring_bytes": 6 * GIB, "xkv.load_reserve_bytes": 2 * GIB, "xkv.store_backlog_bytes": 4 * GIB}
SLOTS = {"xkv.fragment_bytes": (1 << 20) - 1024}
OF_XKV: dict[str, dict[str, int]] = {
    "xkv": RING,
    "xkvslots": RING | SLOTS,  # fewer, larger slots
    # As much memory as the CPU offloading has: what was loaded once is found in the ring.
    "xkvring": SLOTS
    | {"xkv.ring_bytes": 24 * GIB, "xkv.load_reserve_bytes": 18 * GIB, "xkv.store_backlog_bytes": 4 * GIB},
}
LENGTHS = (8_000, 32_000, 64_000)
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "mla": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,  # none of the layers has them
        "first_k_dense_replace": 27,
        "vocab_size": 102400,
        "max_position_embeddings": 131072,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
}


def offloading(name: str, folder: Path) -> dict[str, Any] | None:
    """What `kv_connector_extra_config` says, for each kind of engine."""
    if name == "none":
        return None
    if name == "cpu":
        return {"spec_name": "CPUOffloadingSpec", "cpu_bytes_to_use": 24 * GIB, "blocks_per_chunk": 16}
    return {
        "spec_name": "XkvOffloadingSpec",
        "spec_module_path": "xkv_offload",
        "blocks_per_chunk": 16,
        "xkv.path": str(folder / "card"),
        "xkv.socket_dir": str(folder / "sockets"),
        "xkv.capacity_bytes": 28 * GIB,
        "xkv.databases": 8,
        "xkv.io_threads": 16,
        "xkv.linger_s": 5.0,
        "xkv.connect_timeout_ms": 60_000,
        **OF_XKV[name],
    }


def prompt(length: int, number: int) -> list[int]:
    """Tokens that no other number shares a prefix with."""
    return [(7 * i * i + 3 * i + 11 * number + 1) % 60_000 + 5 for i in range(length)]


def use_lively_weights() -> None:
    """From now on weights that are made up are as large as trained ones, and norms let everything through.

    As vLLM makes them, what a layer adds is next to nothing, and the tokens are the same whatever was restored.
    """
    import torch  # noqa: PLC0415 - only the children load it
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader  # noqa: PLC0415 - as above

    genuine = DummyModelLoader.load_weights

    def load(loader: Any, model: Any, model_config: Any) -> None:
        genuine(loader, model, model_config)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() == 1:
                    weight.fill_(1)
                else:
                    weight.mul_(WEIGHT_SCALE)

    DummyModelLoader.load_weights = load


def make_engine(name: str, folder: Path, shape: str, *, graphs: bool) -> Any:
    """An engine in this process, with weights that are made up (alike in each process)."""
    from vllm import LLM  # noqa: PLC0415 - only the children load vLLM

    use_lively_weights()
    (folder / shape).mkdir(parents=True, exist_ok=True)
    (folder / shape / "config.json").write_text(json.dumps({**SHAPES[shape], "torch_dtype": "bfloat16"}))
    extra = offloading(name, folder)
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return LLM(
        model=str(folder / shape),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=not graphs,
        # Steps that decode are replayed whole; nothing is compiled, which would take minutes.
        compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8]}
        if graphs
        else None,
        dtype="bfloat16",
        block_size=64 if shape == "mla" else 16,
        max_model_len=66_000,
        max_num_batched_tokens=8_192,
        gpu_memory_utilization=0.5,
        kv_transfer_config=transfer if extra is not None else None,
    )


def timed_submits() -> dict[str, list[float]]:
    """From now on, how long each submit keeps vLLM's thread."""
    from xkv_offload.worker import XkvWorker  # noqa: PLC0415 - only where xkv is measured

    taken: dict[str, list[float]] = {"submit_store": [], "submit_load": []}

    def wrap(name: str, call: Callable[..., bool]) -> None:
        def timed(*args: Any, **kwargs: Any) -> bool:
            began = time.perf_counter()
            result = call(*args, **kwargs)
            taken[name].append(time.perf_counter() - began)
            return result

        setattr(XkvWorker, name, timed)

    wrap("submit_store", XkvWorker.submit_store)
    wrap("submit_load", XkvWorker.submit_load)
    return taken


def ask(llm: Any, tokens: list[int]) -> dict[str, Any]:
    """One request; seconds to its second token."""
    from vllm import SamplingParams  # noqa: PLC0415 - as above

    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, detokenize=False, ignore_eos=True)
    began = time.perf_counter()
    output = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)[0]
    return {
        "s": time.perf_counter() - began,
        "cached": output.num_cached_tokens,
        "tokens": list(output.outputs[0].token_ids),
    }


def restores(llm: Any, name: str, lengths: tuple[int, ...]) -> dict[str, Any]:
    """For each length: cold, a hit in GPU memory, and restored after that was forgotten."""
    found: dict[str, Any] = {}
    ask(llm, prompt(3_000, 1))  # compiles what has to be
    for number, length in enumerate(lengths, 2):
        tokens = prompt(length, number)
        cold, hit = ask(llm, tokens), ask(llm, tokens)
        one: dict[str, Any] = {"cold_s": cold["s"], "hit_s": hit["s"], "hit_cached": hit["cached"]}
        if name != "none":
            time.sleep(3.0)  # what the last step stored is confirmed meanwhile
            runs = []
            for _ in range(RESTORES):
                llm.reset_prefix_cache()
                runs.append(ask(llm, tokens))
            one |= {
                "restored_s": statistics.median(run["s"] for run in runs),
                "restored_all_s": [round(run["s"], 3) for run in runs],
                "restored_cached": runs[-1]["cached"],
                "same_tokens_as_hit": all(run["tokens"] == hit["tokens"] for run in runs),
            }
        found[str(length)] = one
    return found


def canary(llm: Any, length: int) -> dict[str, Any]:
    """What is answered where all that is restored is zeros: other tokens than at a hit, or these prove nothing."""
    from xkv_offload.copy import End, HostMover, Move  # noqa: PLC0415 - only where xkv is measured
    from xkv_offload.device_copy import DeviceMover  # noqa: PLC0415 - as above
    from xkv_store.geometry import HEADER_BYTES  # noqa: PLC0415 - as above

    tokens = prompt(length, 999)
    ask(llm, tokens)
    hit = ask(llm, tokens)
    time.sleep(3.0)
    movers = {mover: mover.start_scatter for mover in (DeviceMover, HostMover)}
    for mover, genuine in movers.items():

        def zeroed(self: Any, move: Move, mark: object, end: End, genuine: Callable[..., None] = genuine) -> None:
            for slot in move.slots:
                slot[HEADER_BYTES:] = 0
            genuine(self, move, mark, end)

        mover.start_scatter = zeroed  # type: ignore[method-assign]
    llm.reset_prefix_cache()
    spoilt = ask(llm, tokens)
    for mover, genuine in movers.items():
        mover.start_scatter = genuine  # type: ignore[method-assign]
    return {"differs": spoilt["tokens"] != hit["tokens"], "restored_cached": spoilt["cached"]}


def decode(llm: Any, *, prompts: bool) -> dict[str, float]:
    """Steps of 8 requests that decode; with `prompts`, while one of 8,000 tokens comes every 12 steps."""
    from vllm import SamplingParams  # noqa: PLC0415 - as above

    engine = llm.llm_engine
    long = SamplingParams(temperature=0, max_tokens=400, detokenize=False, ignore_eos=True)
    short = SamplingParams(temperature=0, max_tokens=1, detokenize=False, ignore_eos=True)
    for number in range(8):
        name = f"decode-{prompts}-{number}"
        engine.add_request(name, {"prompt_token_ids": prompt(1_000, 100 + number + 50 * prompts)}, long)
    for _ in range(20):
        engine.step()
    taken = []
    for step in range(320):
        if prompts and step % 12 == 0:
            engine.add_request(f"prompt-{step}", {"prompt_token_ids": prompt(8_000, 200 + step)}, short)
        began = time.perf_counter()
        engine.step()
        taken.append(time.perf_counter() - began)
    while engine.has_unfinished_requests():
        engine.step()
    taken.sort()
    return {
        "median_ms": 1e3 * statistics.median(taken),
        "p90_ms": 1e3 * taken[len(taken) * 9 // 10],
        "sum_s": sum(taken),
    }


def phase(folder: Path, name: str, shape: str, lengths: tuple[int, ...], *, graphs: bool) -> dict[str, Any]:
    """One engine in this process."""
    submits = timed_submits() if name in OF_XKV else {}
    began = time.perf_counter()
    llm = make_engine(name, folder, shape, graphs=graphs)
    result: dict[str, Any] = {"start_s": time.perf_counter() - began, "lengths": restores(llm, name, lengths)}
    if name in OF_XKV:
        result["canary"] = canary(llm, lengths[0])
    if shape == "8b":
        result["decode_alone"] = decode(llm, prompts=False)
        result["decode_beside_prompts"] = decode(llm, prompts=True)
    for kind, times in submits.items():
        if times:
            result[f"{kind}_us"] = {
                "median": 1e6 * statistics.median(times),
                "max": 1e6 * max(times),
                "count": len(times),
            }
    if name in OF_XKV:
        from xkv_offload.metrics import PROCESS_COUNTERS  # noqa: PLC0415 - as above

        result["counters"] = {key: value for key, value in PROCESS_COUNTERS.items() if value}
        result["gateway"] = gateway_counters(folder)
    return result


def gateway_counters(folder: Path) -> dict[str, int]:
    """What the engine's gateway has read, and what it found in the ring."""
    from xkv_store.sockets import socket_for_card  # noqa: PLC0415 - only where xkv is measured
    from xkv_store.tool import Tool  # noqa: PLC0415 - as above

    with closing(Tool(socket_for_card(folder / "sockets", folder / "card"))) as tool:
        counters = json.loads(tool.status())["counters"]
    return {key: value for key, value in counters.items() if value}


def run_child(folder: Path, name: str, shape: str, lengths: tuple[int, ...], *, graphs: bool) -> dict[str, Any]:
    """The phase in a process of its own; its result is the last line of its output."""
    command = [sys.executable, __file__, str(folder), "--phase", name, shape, ",".join(map(str, lengths))]
    command += ["--graphs"] if graphs else []
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PHASE_S_MAX, env=environment, check=False
        )
        output, errors = done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        output, errors = str(late.stdout or b"", "utf-8"), str(late.stderr or b"", "utf-8")
    lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
    if not lines:
        return {"failed": errors[-2500:] + output[-1500:]}
    result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return result


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    """One line for each engine, shape and length."""
    lines = []
    for name, result in results.items():
        if "failed" in result:
            lines.append(f"{name}: FAILED\n{result['failed']}")
            continue
        for length, one in result["lengths"].items():
            text = f"{name:<13} {length:>6} tokens  cold {one['cold_s']:.3f}  GPU hit {one['hit_s']:.3f}"
            if "restored_s" in one:
                text += (
                    f"  restored {one['restored_s']:.3f} {one['restored_all_s']} ({one['restored_cached']} tokens,"
                    f" same as hit: {one['same_tokens_as_hit']})"
                )
            lines.append(text)
        rest = {key: value for key, value in result.items() if key != "lengths"}
        lines.append(f"{name:<13} {json.dumps(rest)}")
    return lines


def main() -> None:
    """Each engine in turn; the table and the file last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engines", default="none-8b,cpu-8b,xkv-8b,xkvslots-8b,xkvring-8b,none-8b,cpu-mla,xkvring-mla")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--graphs", action="store_true", help="decode by CUDA graphs, as engines do that serve")
    parser.add_argument("--phase", nargs=3)
    options = parser.parse_args()
    if options.phase:
        name, shape, lengths = options.phase
        result = phase(
            options.folder, name, shape, tuple(int(one) for one in lengths.split(",")), graphs=options.graphs
        )
        print("RESULT " + json.dumps(result), flush=True)
        os._exit(0)  # an engine's threads need not be waited for
    results = {}
    for engine in options.engines.split(","):
        name, shape = engine.split("-")
        folder = options.folder / engine
        key = f"{engine} again" if engine in results else engine
        lengths = tuple(int(one) for one in options.lengths.split(","))
        results[key] = run_child(folder, name, shape, lengths, graphs=options.graphs)
        print("\n".join(table({key: results[key]})), flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1))
        shutil.rmtree(folder, ignore_errors=True)
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
