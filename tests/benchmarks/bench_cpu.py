"""What the torch step and scan cost on this CPU, against the matrix products around them.

    python tests/benchmarks/bench_cpu.py

Every ratio is of times of one run: the model is timed with everything in it and with its matrix products alone, turn
and turn about, and the medians are divided. The layers are cycled, so that no layer's weights wait in the cache.

One thread by default, and the processor time it takes, which other processes on the machine change little. With
--threads of more than one it is the time on the clock, for a machine that does nothing else.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from random_layers import MIMO_187M, SISO_187M, random_weights  # noqa: E402

from vllm_mamba3.kernels import Mamba3Layout, Mamba3States, mamba3_scan, mamba3_step  # noqa: E402

LAYERS, D_MODEL, VOCABULARY, PROMPT = 12, 768, 128256, 1024
SHAPES = {"siso-187m": (SISO_187M, 1536), "mimo-187m": (MIMO_187M, 1280)}  # layout, d_intermediate
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Ratio(NamedTuple):
    """Milliseconds of a pass with everything and of its matrix products alone."""

    all: float
    products: float

    @property
    def ratio(self) -> float:
        return self.all / self.products


class Layer:
    """One block's random weights and the states of one sequence, in slot 1 of two."""

    def __init__(self, layout: Mamba3Layout, d_intermediate: int, dtype: torch.dtype, seed: int):
        matrix = lambda rows, columns: torch.randn(rows, columns, dtype=dtype) / columns**0.5
        self.layout = layout
        self.in_proj, self.out_proj = matrix(layout.projection_size, D_MODEL), matrix(D_MODEL, layout.inner_size)
        self.fc1, self.fc2 = matrix(2 * d_intermediate, D_MODEL), matrix(D_MODEL, d_intermediate)
        self.norm = torch.ones(D_MODEL, dtype=dtype)
        self.weights = random_weights(layout, seed, torch.float32)
        dtypes = Mamba3States.dtypes(dtype)
        self.pools = Mamba3States(*(torch.zeros(2, *s, dtype=d) for s, d in zip(layout.state_shapes, dtypes)))
        self.slots, self.one = torch.tensor([1], dtype=torch.int32), torch.tensor([True])

    def mixer(self, x: torch.Tensor) -> torch.Tensor:
        """A step where x has one row, else a scan."""
        projected = F.linear(x, self.in_proj)
        out = projected.new_empty(x.shape[0], self.layout.inner_size)
        if x.shape[0] == 1:
            mamba3_step(projected, self.weights, self.pools, self.slots, out)
        else:
            ends = torch.tensor([0, x.shape[0]], dtype=torch.int32)
            mamba3_scan(projected, self.weights, self.pools, self.slots, ends, self.one, out)
        return F.linear(out, self.out_proj)

    def mixer_products(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x, self.in_proj)[:, : self.layout.inner_size], self.out_proj)

    def block(self, residual: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        residual = residual + self.mixer(F.rms_norm(residual, (D_MODEL,)).to(dtype) * self.norm)
        value, gate = F.linear(F.rms_norm(residual, (D_MODEL,)).to(dtype) * self.norm, self.fc1).chunk(2, -1)
        return residual + F.linear(value * F.silu(gate), self.fc2)

    def block_products(self, x: torch.Tensor) -> torch.Tensor:
        x = self.mixer_products(x)
        return F.linear(F.linear(x, self.fc1)[:, : self.fc2.shape[1]], self.fc2)


def layers_of(shape: str, dtype: str) -> list[Layer]:
    return [Layer(*SHAPES[shape], DTYPES[dtype], seed) for seed in range(LAYERS)]


def decode_mixers(layers: list[Layer]) -> Ratio:
    """All layers' mixers for one token at batch 1: in_proj, step, out_proj; against in_proj and out_proj."""
    x = torch.randn(1, D_MODEL, dtype=layers[0].in_proj.dtype)
    return compare(lambda: [layer.mixer(x) for layer in layers], lambda: [layer.mixer_products(x) for layer in layers])


def decode_model(layers: list[Layer]) -> Ratio:
    """One decoding step of the whole model at batch 1, head and all; against its matrix products."""
    dtype = layers[0].in_proj.dtype
    x, head = torch.randn(1, D_MODEL, dtype=dtype), torch.randn(VOCABULARY, D_MODEL, dtype=dtype)

    def everything():
        residual = x.float()
        for layer in layers:
            residual = layer.block(residual, dtype)
        F.linear(F.rms_norm(residual, (D_MODEL,)).to(dtype), head)

    def products():
        for layer in layers:
            layer.block_products(x)
        F.linear(x, head)

    return compare(everything, products)


def scan_over_projections(layers: list[Layer]) -> Ratio:
    """One layer's scan of a prompt; against in_proj and out_proj of the prompt. `all` is the scan without them."""
    layer = layers[0]
    x = torch.randn(PROMPT, D_MODEL, dtype=layer.in_proj.dtype)
    projected = F.linear(x, layer.in_proj)
    out, ends = projected.new_empty(PROMPT, layer.layout.inner_size), torch.tensor([0, PROMPT], dtype=torch.int32)
    scan = lambda: mamba3_scan(projected, layer.weights, layer.pools, layer.slots, ends, layer.one, out)
    return compare(scan, lambda: layer.mixer_products(x))


def compare(everything: Callable, products: Callable, seconds: float = 3.0) -> Ratio:
    """Time both, turn and turn about, for about `seconds`; at least 7 times each."""
    times, clock = ([], []), time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    until = time.perf_counter() + seconds
    with torch.inference_mode():
        everything(), products()
        while len(times[0]) < 7 or time.perf_counter() < until:
            for run, taken in zip((everything, products), times):
                start = clock()
                run()
                taken.append(1e3 * (clock() - start))
    return Ratio(*map(statistics.median, times))


MEASUREMENTS = {
    "decode, mixers": decode_mixers,
    "decode, whole model": decode_model,
    "scan of 1,024 / projections": scan_over_projections,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--dtype", choices=DTYPES, action="append")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(describe_machine())
    print(f"{'shape':<10} {'dtype':<9} {'measured':<28} {'all, ms':>8} {'products, ms':>13} {'ratio':>6}")
    for shape in arguments.shape or SHAPES:
        for dtype in arguments.dtype or DTYPES:
            layers = layers_of(shape, dtype)
            for name, measure in MEASUREMENTS.items():
                ratio = measure(layers)
                figures = f"{ratio.all:>8.2f} {ratio.products:>13.2f} {ratio.ratio:>6.2f}"
                print(f"{shape:<10} {dtype:<9} {name:<28} {figures}", flush=True)


def describe_machine() -> str:
    """Processor, cores, versions, commit."""
    here = Path(__file__).parent
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True)
    names = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    processor = names[0] if names else platform.processor() or platform.machine()
    return (f"{processor}, {torch.get_num_threads()} of {os.cpu_count()} cores, "
            f"{torch.backends.cpu.get_cpu_capability()}; torch {torch.__version__}, "
            f"vllm-mamba3 {version('vllm-mamba3')} at {commit.stdout.strip() or 'no commit'}")


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


if __name__ == "__main__":
    main()
