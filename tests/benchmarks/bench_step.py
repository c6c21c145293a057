# python tests/benchmarks/bench_step.py [--only siso-24 mimo-64] [--batches 1 16 64 256] [--state-dtype float32]
"""µs a layer of one decode step on a GPU: ours, the official pieces, vLLM's Mamba-2, and the floor, in one run.

Each figure is of a CUDA graph over 12 layers, each with states of its own, the median of 20 replays. The floor is the ssm
state read once and written once at the bandwidth of a copy in this run, counting what is read and what is written. "ours"
is everything between the projections. A peer that can't be had is a dash, with the reason below the table.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from statistics import median

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
import step_peers as peers
from random_layers import random_weights

from vllm_mamba3.kernels import Mamba3Layout, Mamba3States

LAYERS, REPLAYS = 12, 20
SHAPES = {
    f"{kind}-{heads}": Mamba3Layout(heads, 64, 128, 1, 32, rank, rank > 1)
    for kind, rank in (("siso", 1), ("mimo", 4)) for heads in (24, 64)
}
COLUMNS = ("ours", "official step", "its projections", "official CuTe", "official Triton", "vLLM Mamba-2")


def microseconds(make) -> float:
    """make() gives one layer's step; the time of one of them in a graph of LAYERS."""
    steps = [make() for _ in range(LAYERS)]
    for step in steps:
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            step()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in times) * 1e3 / LAYERS


def copy_bandwidth() -> float:
    """Bytes read and written per second by a copy of 2 GB."""
    source = torch.randint(256, (2 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(10):
        target.copy_(source)
    end.record()
    torch.cuda.synchronize()
    return 10 * 2 * source.numel() / start.elapsed_time(end) * 1e3


def pools_of(layout: Mamba3Layout, state_dtype: torch.dtype):
    """Pools of random states as vLLM lays them: one page a slot, the four states one after another in it."""
    kinds = Mamba3States.dtypes(torch.bfloat16, state_dtype)
    sizes = [torch.Size(shape).numel() * kind.itemsize for shape, kind in zip(layout.state_shapes, kinds)]

    def make(slots: int) -> Mamba3States:
        pages = torch.empty(slots, sum(sizes) + -sum(sizes) % 64, dtype=torch.uint8, device="cuda")
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        pools = Mamba3States(*(
            pages[:, start : start + size].view(kind).unflatten(1, shape)
            for start, size, shape, kind in zip(starts, sizes, layout.state_shapes, kinds)
        ))
        for pool in pools:
            pool.normal_()
        pools.angle.remainder_(6.28)
        return pools

    return make


def measure(layout: Mamba3Layout, batch: int, state_dtype: torch.dtype, missing: dict[str, str]) -> dict[str, float]:
    random = random_weights(layout, 0, torch.float32)
    weights = type(random)(layout, *(None if tensor is None else tensor.cuda() for tensor in random.tensors()))
    makes = {
        "ours": lambda: peers.ours(weights, pools_of(layout, state_dtype), batch),
        "official step": lambda: peers.official_step(layout, batch, peers.official_module(layout)),
        "its projections": lambda: peers.official_projections(layout, batch, peers.official_module(layout)),
        "official CuTe": lambda: peers.official_cute(layout, batch),
        "vLLM Mamba-2": lambda: peers.vllm_mamba2(layout, batch),
    }
    if not layout.is_mimo:
        makes["official Triton"] = lambda: peers.official_siso(layout, batch)
    found = {}
    for name, make in makes.items():
        if name in missing:
            continue
        try:
            found[name] = microseconds(make)
        except Exception as error:  # whatever another project's code does not like: said below the table
            if name == "ours":
                raise
            missing[name] = f"{type(error).__name__}: {str(error)[:200]}"
        torch.cuda.empty_cache()
    return found


def show(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16, 64, 256])
    parser.add_argument("--state-dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    args = parser.parse_args()
    state_dtype, bandwidth, missing = getattr(torch, args.state_dtype), copy_bandwidth(), {}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, commit "
          f"{commit or 'unknown'}; ssm state {args.state_dtype}; a copy moves {bandwidth / 1e12:.2f} TB/s\n")
    print("| | B | floor | " + " | ".join(COLUMNS) + " | official between the projections | ours / floor "
          "| ours / CuTe | official between / ours |\n| --- |" + " --- |" * (len(COLUMNS) + 6), flush=True)
    for name in args.only:
        layout = SHAPES[name]
        for batch in args.batches:
            found = measure(layout, batch, state_dtype, missing)
            floor = 2 * batch * layout.inner_size * layout.state_size * state_dtype.itemsize / bandwidth * 1e6
            whole, projections = found.get("official step"), found.get("its projections")
            between = whole - projections if whole and projections else None
            ours, cute = found["ours"], found.get("official CuTe")
            ratios = (ours / floor, cute and ours / cute, between and between / ours)
            print(f"| {name} | {batch} | {show(floor)} | "
                  + " | ".join(show(value) for value in (*map(found.get, COLUMNS), between))
                  + " | " + " | ".join("-" if value is None else f"{value:.2f}" for value in ratios) + " |", flush=True)
    for name, reason in missing.items():
        print(f"\n{name}: {reason}")


if __name__ == "__main__":
    main()
