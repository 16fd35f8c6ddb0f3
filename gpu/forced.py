# SPDX-License-Identifier: Apache-2.0
"""Forced routed experts on a GPU: what the engine computes with them, and what they cost.

    python -m gpu.forced check --out DIR [--tensor-parallel N] [--families N ...]
    python -m gpu.forced time --out DIR [--model qwen3|gpt-oss]

`check` starts an engine for each way in which a router weighs its experts. The oracle of its
log-probabilities is `transformers`, whose routers take the same experts. The engine's kernels round
matrix products of float32 to TF32, so they differ by up to `CLOSE`. Experts at random change them
by more than `FAR`. `time` measures prefills whose experts are forced, and decodes beside them. Both
write to `DIR`. The exit status is the number of failed checks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.common import table
from harness.checkpoint import make_checkpoint
from harness.shapes import GPT_OSS_20B, QWEN3_30B_A3B

Rows = npt.NDArray[Any]
CLOSE, FAR = 0.02, 0.1
TOKENS, NEW = 100, 6
# One family for each way of weighing.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax, renormalized": ("qwen3_moe", {"mlp_only_layers": [1]}),
    "softmax of the chosen": ("mixtral", {"num_experts_per_tok": 4, "num_local_experts": 16}),
    "softmax": ("olmoe", {}),
    "sigmoid with bias": ("glm4_moe", {}),
    "sigmoid with bias and groups": (
        "glm4_moe",
        {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    ),
}
OPTIONS: dict[str, Any] = {
    "enable_return_routed_experts": True,
    "enable_forced_routed_experts": True,
    "gpu_memory_utilization": 0.3,
    "kv_cache_memory_bytes": 1 << 30,
    "seed": 0,
}
SHAPES = {"qwen3": QWEN3_30B_A3B, "gpt-oss": GPT_OSS_20B}


@contextmanager
def running(model: Path, **options: Any) -> Iterator[Any]:
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = LLM(str(model), **{**OPTIONS, **options})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


def make_prompt(seed: int, length: int = TOKENS, vocabulary: int = 700) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(4, vocabulary, length)]


def give(prompt: list[int], rows: Rows) -> dict[str, Any]:
    return {"prompt_token_ids": prompt, "forced_routed_experts": rows}


def ask(llm: Any, *prompts: Any, **sampling: Any) -> list[Any]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, ignore_eos=True, **sampling)
    given = [p if isinstance(p, dict) else {"prompt_token_ids": p} for p in prompts]
    outputs: list[Any] = llm.generate(given, params, use_tqdm=False)
    return outputs


def log_probs(output: Any) -> Rows:
    """Of the prompt's tokens but the first, and of the new tokens."""
    tokens = [*output.prompt_token_ids[1:], *output.outputs[0].token_ids]
    found = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    return np.array([p[t].logprob for p, t in zip(found, tokens, strict=True)])


class Reference:
    """`transformers`, whose routers take the rows of the prompt."""

    def __init__(self, model: Path) -> None:
        import torch
        import transformers

        torch.backends.cuda.matmul.allow_tf32 = False
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        ).eval()

    def log_probs(self, output: Any) -> Rows:
        import torch

        from examples.replay import OWN, replay

        completion = output.outputs[0]
        tokens = [*output.prompt_token_ids, *completion.token_ids]
        rows = completion.routed_experts[:TOKENS].astype("int64")
        routes = torch.full((1, len(tokens), *rows.shape[1:]), OWN)
        routes[0, :TOKENS] = torch.from_numpy(rows)
        with torch.inference_mode(), replay(self.model, routes, completion.moe_layers):
            logits = self.model(torch.tensor([tokens]), use_cache=False).logits[0]
        of_tokens = logits.log_softmax(-1)[range(len(tokens) - 1), tokens[1:]]
        found: Rows = of_tokens.numpy()
        return found


def check_family(name: str, out: Path, ranks: int) -> list[dict[str, Any]]:
    """The results of the checks of one family."""
    family, overrides = FAMILIES[name]
    folder = out / "models" / name.replace(",", "").replace(" ", "-")
    model = make_checkpoint(folder, family, **overrides)
    reference = Reference(model)
    results: list[dict[str, Any]] = []

    def note(check: str, found: float, good: bool) -> None:
        results.append({"family": name, "check": check, "difference": found, "good": bool(good)})
        print(f"{name}: {check}: {found:.2g}: {'right' if good else 'WRONG'}", flush=True)

    graphs = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 128]}
    options: dict[str, Any] = {
        "dtype": "float32",
        "block_size": 32,
        "max_model_len": 1024,
        "max_num_batched_tokens": 256,
    }
    with running(model, tensor_parallel_size=ranks, compilation_config=graphs, **options) as llm:
        sampling = {"max_tokens": NEW, "logprobs": 0, "prompt_logprobs": 0}
        prompt = make_prompt(1)
        (own,) = ask(llm, prompt, **sampling)
        rows, layers = own.outputs[0].routed_experts[:TOKENS], list(own.outputs[0].moe_layers)
        rng = np.random.default_rng(2)
        others = np.zeros_like(rows)
        others[:, layers] = rng.random((*rows.shape[:2], 16)).argsort(-1)[
            :, layers, : rows.shape[2]
        ]
        some = others.astype("int32")
        some[1::2] = -1

        def distance(given: Rows, found: Any) -> float:
            taken = (given[:, layers] >= 0).all(-1)
            returned = found.outputs[0].routed_experts[:TOKENS, layers]
            assert (returned[taken] == given[:, layers][taken]).all(), "other rows come back"
            return float(np.abs(log_probs(found) - reference.log_probs(found)).max())

        difference = distance(rows, own)
        note("not forced, against transformers", difference, difference < CLOSE)
        for check, given in (
            ("own rows", rows),
            ("own rows in another order", rows[:, :, ::-1]),
            ("experts at random", others),
            ("every second token at random", some),
        ):
            assert llm.reset_prefix_cache()
            (forced,) = ask(llm, give(prompt, given), **sampling)
            difference = distance(given, forced)
            note(f"{check}, against transformers", difference, difference < CLOSE)
            change = np.abs(log_probs(forced)[: TOKENS - 1] - log_probs(own)[: TOKENS - 1]).max()
            is_own = check.startswith("own")
            note(
                f"{check}, against not forced",
                float(change),
                change < CLOSE if is_own else change > FAR,
            )
        assert llm.reset_prefix_cache()
        silent = {"max_tokens": NEW, "logprobs": 0}
        ask(llm, give(prompt, others), **silent)
        (hit,) = ask(llm, give(prompt, others), **silent)
        (plain,) = ask(llm, prompt, **silent)
        note("hits with the same rows", hit.num_cached_tokens, hit.num_cached_tokens > 0)
        note("hits without rows", plain.num_cached_tokens, plain.num_cached_tokens == 0)
        beside = ask(llm, give(make_prompt(3), others), make_prompt(4), **sampling)[1]
        difference = float(np.abs(log_probs(beside) - reference.log_probs(beside)).max())
        note("a neighbour of forced tokens", difference, difference < CLOSE)
    return results


def check(out: Path, ranks: int, families: list[str]) -> int:
    results: list[dict[str, Any]] = []
    for name in families:
        try:
            results += check_family(name, out, ranks)
        except Exception as error:
            traceback.print_exc()
            results.append({"family": name, "check": repr(error)[:300], "good": False})
        # After each engine: a limit of the host's time loses nothing.
        (out / f"forced-tp{ranks}.json").write_text(json.dumps(results, indent=1))
    wrong = [r for r in results if not r["good"]]
    print(f"{len(results)} checks, {len(wrong)} failed")
    return len(wrong)


def measure(llm: Any, kind: str, layers: int, top_k: int, experts: int) -> float:
    """Seconds. `prefill`: 8,192 tokens of one prompt, in one step. `forced`: the same, all forced.
    `decode`: 64 requests decode beside 8 prefills of 1,024 tokens; `beside`: these are forced."""
    rng = np.random.default_rng()
    rows = (
        rng.random((8192, 1, experts)).argsort(-1)[:, :, :top_k].astype("uint8").repeat(layers, 1)
    )

    def make(length: int, forced: bool) -> Any:
        prompt = make_prompt(int(rng.integers(1 << 30)), length)
        return give(prompt, rows[:length]) if forced else prompt

    from vllm import SamplingParams

    if kind in {"prefill", "forced"}:
        given = [make(8192, kind == "forced")]
        params = [SamplingParams(max_tokens=1, temperature=0.0)]
    else:
        given = [make(64, False) for _ in range(64)] + [
            make(1024, kind == "beside") for _ in range(8)
        ]
        lengths = [128] * 64 + [1] * 8
        params = [SamplingParams(max_tokens=n, ignore_eos=True, temperature=0.0) for n in lengths]
    asked = [p if isinstance(p, dict) else {"prompt_token_ids": p} for p in given]
    began = time.perf_counter()
    llm.generate(asked, params, use_tqdm=False)
    return time.perf_counter() - began


def measure_all(out: Path, model: str, num_layers: int, rounds: int) -> int:
    """Medians of interleaved rounds, with the flag off and on."""
    shape = {**SHAPES[model], "num_hidden_layers": num_layers}
    if "layer_types" in shape:
        shape["layer_types"] = shape["layer_types"][:num_layers]
    experts = shape.get("num_experts") or shape["num_local_experts"]
    folder = out / "models" / model
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape))
    options: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 9216,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 128,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 4 << 30,
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128]},
    }
    lines: list[tuple[str, ...]] = []
    for flag in (True, False):
        kinds = ["prefill", "decode", *(["forced", "beside"] if flag else [])]
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        with running(folder, **options, enable_forced_routed_experts=flag) as llm:
            for turn in range(rounds + 1):
                for kind in kinds if turn % 2 else reversed(kinds):
                    taken = measure(llm, kind, num_layers, shape["num_experts_per_tok"], experts)
                    if turn:
                        seconds[kind].append(taken)
        for kind, found in seconds.items():
            middle = f"{1000 * statistics.median(found):.1f}"
            spread = f"{1000 * min(found):.1f} to {1000 * max(found):.1f}"
            lines.append(("on" if flag else "off", kind, middle, spread, str(len(found))))
        text = table(("Flag", "Load", "Median, ms", "Least to most, ms", "Rounds"), lines)
        (out / f"forced-time-{model}.md").write_text(text + "\n")
    print(text)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m gpu.forced", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("what", choices=("check", "time"))
    parser.add_argument("--out", type=Path, required=True, help="folder for tables and models")
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N", help="GPUs of an engine"
    )
    parser.add_argument(
        "--families",
        type=int,
        nargs="+",
        default=range(len(FAMILIES)),
        metavar="N",
        help="checked: " + "; ".join(f"{place} {name}" for place, name in enumerate(FAMILIES)),
    )
    parser.add_argument("--model", choices=SHAPES, default="qwen3", help="shape that is timed")
    parser.add_argument("--layers", type=int, default=24, help="of the shape that is timed")
    parser.add_argument("--rounds", type=int, default=12, help="of each load")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    # An engine that has ended leaves CUDA initialized in this process.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if given.what == "check":
        families = [list(FAMILIES)[place] for place in given.families]
        return check(given.out, given.tensor_parallel, families)
    return measure_all(given.out, given.model, given.layers, given.rounds)


if __name__ == "__main__":
    sys.exit(main())
