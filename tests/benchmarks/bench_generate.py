"""Tokens a second of `LLM.generate` on a GPU, random weights: our Mamba-3 without MLP against vLLM's own Mamba-2 of the
same d_model, layers, heads, head and state size, vocabulary; bfloat16 with float32 ssm states, 64 prompt and 512 output
tokens, CUDA graphs of just these batches, else default settings, each engine in a process of its own.

    python tests/benchmarks/bench_generate.py [--size 187m 1.5b] [--requests 1 64 256] [--only mamba2 siso mimo]
        [--multiprocessing] [--json PATH]

The floor of a step is the model's weights read once, and the ssm states of all requests read once and written once, at
the bandwidth of a copy. "kernels" is the GPU's time in kernels for a decode step, from a profile of a few, over the
time of a step without the profiler: what is missing to 1 is time in which the GPU waits.

The engine core runs in the process of `LLM`, where it can be profiled. With --multiprocessing it has its own, as is
vLLM's default, and is not. Without a GPU it is a dry run on the CPU: --size tiny, with VLLM_CPU_KVCACHE_SPACE=1.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SIZES = {"tiny": (64, 2), "187m": (768, 12), "1.5b": (2048, 24)}  # d_model, layers
HEAD_DIM, STATE_SIZE, VOCABULARY = 64, 128, 128256
PROMPT, OUTPUT = 64, 512
PROFILED = 16  # decode steps
REPEATS = 3  # of which the fastest counts: the rest is what else the machine did


def mamba2_config(d_model: int, layers: int) -> dict:
    return dict(
        architectures=["Mamba2ForCausalLM"], model_type="mamba2", hidden_size=d_model, num_hidden_layers=layers,
        num_heads=2 * d_model // HEAD_DIM, head_dim=HEAD_DIM, state_size=STATE_SIZE, expand=2, n_groups=1,
        conv_kernel=4, vocab_size=VOCABULARY, tie_word_embeddings=True, torch_dtype="bfloat16", layer_norm_epsilon=1e-5,
        residual_in_fp32=True, use_conv_bias=True, use_bias=False, hidden_act="silu", chunk_size=256, rms_norm=True,
    )


def mamba3_config(d_model: int, layers: int, mimo: bool) -> dict:
    ssm = dict(layer="Mamba3", d_state=STATE_SIZE, headdim=HEAD_DIM, expand=2, ngroups=1, rope_fraction=0.5)
    if mimo:
        ssm |= dict(is_mimo=True, mimo_rank=4, chunk_size=16)
    return dict(
        d_model=d_model, d_intermediate=0, n_layer=layers, vocab_size=VOCABULARY, ssm_cfg=ssm, attn_layer_idx=[],
        attn_cfg={}, rms_norm=True, residual_in_fp32=True, fused_add_norm=True, pad_vocab_size_multiple=16,
        tie_embeddings=True,
    )


def weight_bytes(model) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())


def run_engine(folder: Path, requests: list[int]) -> None:
    """In a process of its own: prints a line of JSON a number of requests, and one of the model's size."""
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # greedy needs none, and it would be compiled at start-up
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # for apply_model with a core in another process
    in_process = os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    import torch
    from bench_generate import weight_bytes  # under a name that another process can import
    from torch.profiler import ProfilerActivity, profile
    from vllm import LLM, SamplingParams

    on_gpu = torch.cuda.is_available()
    llm = LLM(str(folder), dtype="bfloat16", load_format="dummy", skip_tokenizer_init=True, max_model_len=1024, seed=0,
              mamba_ssm_cache_dtype="float32", enable_prefix_caching=False,
              **(dict(max_num_seqs=max(requests), compilation_config=dict(cudagraph_capture_sizes=sorted(requests)))
                 if on_gpu else dict(max_num_seqs=4, num_gpu_blocks_override=16)))
    print(json.dumps(dict(weight_bytes=llm.apply_model(weight_bytes)[0])), flush=True)

    def work(count: int, tokens: int) -> tuple[list, SamplingParams]:
        prompts = [{"prompt_token_ids": [(7 * i + j) % 1000 for j in range(PROMPT)]} for i in range(count)]
        return prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)

    def generate(count: int, tokens: int) -> float:
        prompts, params = work(count, tokens)
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    def kernel_seconds(count: int) -> float:
        """The GPU's time in kernels for one decode step, in the mean of PROFILED."""
        engine, (prompts, params) = llm.llm_engine, work(count, PROFILED + 16)
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), prompt, params)
        written = dict.fromkeys(range(count), 0)
        while min(written.values()) < 4:  # past every prompt, and past what of it the GPU may still be at
            written |= {int(out.request_id): len(out.outputs[0].token_ids) for out in engine.step()}
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiled:
            for _ in range(PROFILED):
                engine.step()
        while engine.has_unfinished_requests():
            engine.step()
        return sum(event.self_device_time_total for event in profiled.key_averages()) / 1e6 / PROFILED

    for count in requests:
        generate(count, 8)
        output = OUTPUT if on_gpu else 4
        first = min(generate(count, 1) for _ in range(REPEATS))
        seconds = min(generate(count, output) for _ in range(REPEATS))
        found = dict(requests=count, seconds=seconds, step=(seconds - first) / (output - 1), output=output)
        if in_process:
            found["kernels"] = kernel_seconds(count) / found["step"]
        print(json.dumps(found), flush=True)


def machine() -> tuple[str, float]:
    """Device, versions and commit, and the bytes a second of a copy; in a process of its own, so that no memory stays
    behind."""
    code = ("import json, sys; sys.path.insert(0, sys.argv[1]); from bench_step import copy_bandwidth, describe; "
            "print(json.dumps([describe(), copy_bandwidth()]))")
    done = subprocess.run([sys.executable, "-c", code, Path(__file__).parent], stdout=subprocess.PIPE, text=True,
                          check=True)
    return tuple(json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["187m"])
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 64, 256])
    parser.add_argument("--only", "--models", dest="models", nargs="+", choices=["mamba2", "siso", "mimo"],
                        default=["mamba2", "siso", "mimo"])
    parser.add_argument("--multiprocessing", action="store_true", help="the engine core in a process of its own")
    parser.add_argument("--json", type=Path, help="write the rows here too, after each")
    parser.add_argument("--engine", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        return run_engine(args.engine, args.requests)
    (described, bandwidth), rates, rows = machine(), {}, []
    environment = os.environ | dict(VLLM_ENABLE_V1_MULTIPROCESSING=str(int(args.multiprocessing)))
    print(f"{described}; a copy moves {bandwidth / 1e12:.2f} TB/s\n\n| size | model | requests | tokens/s | ms a step "
          "| floor, ms | floor / step | kernels | over Mamba-2 |\n| --- |" + " --- |" * 8, flush=True)
    for size in args.size:
        d_model, layers = SIZES[size]
        for name in args.models:
            config = mamba3_config(d_model, layers, name == "mimo")
            if name == "mamba2":
                config = mamba2_config(d_model, layers)
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "config.json").write_text(json.dumps(config))
                errors = open(Path(folder, "errors"), "w+")  # a pipe that nobody reads would fill
                engine = subprocess.Popen(
                    [sys.executable, __file__, "--engine", folder, "--requests", *map(str, args.requests)],
                    stdout=subprocess.PIPE, text=True, stderr=errors, env=environment)
                weights = None
                for line in engine.stdout:
                    if not line.startswith("{"):
                        continue
                    found = json.loads(line)
                    weights = found.get("weight_bytes", weights)
                    if "requests" not in found:
                        continue
                    count, step = found["requests"], found["step"]
                    rates[size, name, count] = count * found["output"] / found["seconds"]
                    states = 2 * count * layers * 2 * d_model * STATE_SIZE * 4
                    floor = (weights + states) / bandwidth
                    base, kernels = rates.get((size, "mamba2", count)), found.get("kernels")
                    over = rates[size, name, count] / base if base else None
                    print(f"| {size} | {name} | {count} | {rates[size, name, count]:.0f} | {step * 1e3:.3f} "
                          f"| {floor * 1e3:.3f} | {floor / step:.2f} | {'-' if kernels is None else f'{kernels:.2f}'} "
                          f"| {'-' if over is None else f'{over:.2f}'} |", flush=True)
                    rows.append(dict(found, size=size, model=name, floor=floor, rate=rates[size, name, count],
                                     over_mamba2=over))
                    if args.json:
                        written = dict(about=described, bandwidth=bandwidth, rows=rows)
                        args.json.write_text(json.dumps(written, indent=1))
                if engine.wait():
                    errors.seek(0)
                    print(f"\n{name}: the engine ended with {engine.returncode}\n{errors.read()[-3000:]}")
                errors.close()


if __name__ == "__main__":
    main()
