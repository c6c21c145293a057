"""µs a layer of one prefill on a GPU: ours, the official one, vLLM's Mamba-2, and two floors, in one run.

    python tests/benchmarks/bench_scan.py [--only siso-24 mimo-64] [--batches 1x8192 32x512]
        [--providers triton torch "official Triton" "vLLM Mamba-2"] [--json PATH]

A batch is sequences x length. Each figure is the median of 10 calls, each a replay of a CUDA graph where the call can
be captured. "triton" and "torch" are `mamba3_scan` with these implementations: everything between the projections, final
states into their slots. The peers are given what they are given there ready: normed, with step sizes and decays.

The floors: the projected rows read once and the output written once, at the bandwidth of a copy; and the products of
chunks of 64 rows, each once, at the rate of a matrix product in bfloat16. A copy and a product of this run.

Without a GPU it is a dry run on the CPU, of what runs there; its figures say nothing.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
import scan_peers as peers
from bench_step import SHAPES, copy_bandwidth, describe, ratio, show

from vllm_mamba3.kernels import Mamba3Layout

CALLS = 10
BATCHES = ["1x8192", "1x32768", "1x131072", "32x512"]


def microseconds(call) -> float:
    call()
    if peers.DEVICE == "cpu":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            kept = call()  # what is returned is kept, so that nothing else is written where it lies
        call = graph.replay
    except RuntimeError:  # it waits for the device
        kept = None
        torch.cuda.synchronize()
    times = []
    for _ in range(CALLS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    del kept
    return median(start.elapsed_time(end) for start, end in times) * 1e3


def product_rate() -> float:
    """Multiplications and additions a second of a product of square bfloat16 matrices."""
    size = 8192 if peers.DEVICE == "cuda" else 256
    a, b = (peers.normal(size, size) for _ in range(2))
    return 2 * size**3 / microseconds(lambda: a @ b) * 1e6


def floors(layout: Mamba3Layout, tokens: int, bandwidth: float, rate: float) -> tuple[float, float]:
    """µs for the memory and for the arithmetic of a prefill."""
    moved = tokens * (layout.projection_size + layout.inner_size) * 2
    heads, rows = layout.num_heads, 64
    # Of a row: state read, state written, scores, scores times values.
    of_row = 2 * (2 * layout.state_size * layout.head_dim + rows * (layout.state_size + layout.head_dim))
    return moved / bandwidth * 1e6, tokens * layout.rank * heads * of_row / rate * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--batches", nargs="+", default=BATCHES, help="sequences x length")
    parser.add_argument("--providers", nargs="+", choices=peers.PROVIDERS, default=list(peers.PROVIDERS))
    parser.add_argument("--json", type=Path, help="write the rows here too, after each")
    args = parser.parse_args()
    bandwidth, rate, described, rows, missing = copy_bandwidth(), product_rate(), describe(), [], {}
    about = f"{described}; a copy moves {bandwidth / 1e12:.2f} TB/s, a product does {rate / 1e12:.0f} TFLOP/s"
    print(f"{about}\n\n| | sequences x length | memory | arithmetic | " + " | ".join(peers.PROVIDERS)
          + " | triton / floor | official / triton | Mamba-2 / triton |\n| --- |"
          + " --- |" * (len(peers.PROVIDERS) + 6), flush=True)
    for name in args.only:
        for batch in args.batches:
            sequences, length = map(int, batch.split("x"))
            layout, found = SHAPES[name], {}
            for provider in args.providers:
                if (provider, name) in missing:
                    continue
                try:
                    found[provider] = microseconds(peers.PROVIDERS[provider](layout, sequences, length))
                except Exception as error:  # whatever another project's code does not like: said below the table
                    missing[provider, name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                if peers.DEVICE == "cuda":
                    torch.cuda.empty_cache()
            memory, arithmetic = floors(layout, sequences * length, bandwidth, rate)
            ours = found.get("triton")
            ratios = (ratio(ours, max(memory, arithmetic)), ratio(found.get("official Triton"), ours),
                      ratio(found.get("vLLM Mamba-2"), ours))
            print(f"| {name} | {batch} | {show(memory)} | {show(arithmetic)} | "
                  + " | ".join(show(found.get(provider)) for provider in peers.PROVIDERS)
                  + " | " + " | ".join("-" if value is None else f"{value:.2f}" for value in ratios) + " |", flush=True)
            rows.append(dict(shape=name, batch=batch, memory=memory, arithmetic=arithmetic, **found))
            if args.json:
                args.json.write_text(json.dumps(dict(about=about, rows=rows), indent=1))
    for (provider, name), reason in missing.items():
        print(f"\n{provider} of {name}: {reason}")


if __name__ == "__main__":
    main()
