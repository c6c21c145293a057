"""The Triton kernels compiled for GPUs that are not there, as they are launched, and what the compiler says of their
resources."""

import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch
import triton
from random_layers import random_weights
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_mamba3.kernels import Mamba3Layout, Mamba3States
from vllm_mamba3.kernels.scan.triton_scan import triton_scan
from vllm_mamba3.kernels.step import triton_step
from vllm_mamba3.model import mixer
from vllm_mamba3.model.state_cache import scratch_states

TARGETS = {f"sm_{number}": GPUTarget("cuda", number, 32) for number in (80, 86, 89, 90, 100, 120)}
TARGETS["gfx942"] = GPUTarget("hip", "gfx942", 64)
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32", torch.int64: "i64",
         torch.bool: "i1"}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")


class Resources(NamedTuple):
    """Of one program: its warps, registers a thread, bytes spilled a thread, bytes of shared memory."""

    warps: int
    registers: int
    spilled: int
    shared: int


def compile_step(target: str, layout: Mamba3Layout, dtype: str = "bfloat16", ssm_dtype: str = "float32",
                 several: bool = False, out_norm: bool = False, stochastic: bool = False) -> Resources:
    """The step as it is launched: on sm_90 as on an H200."""
    weights, pools, projected, out = _layer(layout, getattr(torch, dtype), getattr(torch, ssm_dtype), out_norm)
    ones, seed = torch.ones(16, dtype=torch.int32), torch.zeros(1, dtype=torch.int64) if stochastic else None
    tokens = dict(cu_seqlens=torch.arange(17).int(), num_accepted_tokens=ones) if several else {}
    device = "NVIDIA H200" if target == "sm_90" else target
    with mock.patch.object(triton_step, "_device_name", lambda _: device):
        (launch,) = launches(lambda: triton_step.triton_step(
            projected, weights, pools, ones[:, None] if several else ones, ones.bool(), out, rounding_seed=seed,
            **tokens))
    return compile_launch(target, *launch)


def compile_scan(target: str, layout: Mamba3Layout, dtype: str = "bfloat16", ssm_dtype: str = "float32",
                 out_norm: bool = False) -> dict[str, Resources]:
    """Every kernel of the scan, by name."""
    weights, pools, projected, out = _layer(layout, getattr(torch, dtype), getattr(torch, ssm_dtype), out_norm)
    ones, ends = torch.ones(1, dtype=torch.int32), torch.tensor([0, 16], dtype=torch.int32)
    found = launches(lambda: triton_scan(projected, weights, pools, ones, ends, ones.bool(), out, ones))
    return {kernel.__name__: compile_launch(target, kernel, *given) for kernel, *given in found}


def scan_specialisations(layout: Mamba3Layout, tokens: int, sequences: int, decodes: int) -> dict[str, tuple]:
    """Of every kernel of the scan, for a batch with so many sequences that decode in front, as the engine packs it."""
    weights, pools, _, _ = _layer(layout, torch.bfloat16, torch.float32, False)
    rows, ends = slice(decodes, decodes + tokens), torch.tensor([*range(sequences), tokens], dtype=torch.int32)
    projected = torch.empty(decodes + tokens, layout.projection_size, dtype=torch.bfloat16)
    out = torch.empty(decodes + tokens, layout.inner_size, dtype=torch.bfloat16)
    slots = torch.ones(decodes + sequences, dtype=torch.int32)[decodes:]
    found = launches(lambda: triton_scan(projected[rows], weights, pools, slots, ends, slots.bool(), out[rows], slots))
    return {kernel.__name__: specialisation(kernel, *given) for kernel, *given in found}


def warmed_up(layout: Mamba3Layout) -> dict[str, list[tuple]]:
    """Of every kernel of the scan, the specialisations that an engine compiles when it starts."""
    weights, pools, _, _ = _layer(layout, torch.bfloat16, torch.float32, False)
    layer = SimpleNamespace(
        weights=weights, scan="triton", max_num_seqs=4, num_drafts=0, run_step=lambda *_: None,
        _state_shapes=[pool.shape[1:] for pool in pools], _state_dtypes=[pool.dtype for pool in pools])
    rows = [torch.empty(32, size, dtype=torch.bfloat16) for size in (layout.projection_size, layout.inner_size)]
    found = {}
    with mock.patch.object(mixer, "mamba3_scan", lambda *arguments: triton_scan(*arguments[:-1])):
        for kernel, *given in launches(lambda: mixer.Mamba3Mixer.run_without_sequences(layer, *rows)):
            found.setdefault(kernel.__name__, []).append(specialisation(kernel, *given))
    return found


def _layer(layout: Mamba3Layout, dtype: torch.dtype, ssm_dtype: torch.dtype, out_norm: bool):
    pools = scratch_states(layout.state_shapes, Mamba3States.dtypes(dtype, ssm_dtype), "cpu")
    return (random_weights(layout, 0, torch.float32, out_norm), pools,
            torch.empty(16, layout.projection_size, dtype=dtype), torch.empty(16, layout.inner_size, dtype=dtype))


def launches(run: Callable[[], None]) -> list[tuple]:
    """What run() launches, instead of launching it: kernel, arguments, arguments by name."""
    found = []
    with mock.patch.object(triton.JITFunction, "run",
                           lambda kernel, *given, grid, warmup, **named: found.append((kernel, given, named))):
        run()
    return found


def compile_launch(target: str, kernel, given: tuple, named: dict) -> Resources:
    signature, constants, aligned = specialisation(kernel, given, named)
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {name: value for name, value in named.items() if name in OPTIONS}
    return resources(target, triton.compile(source, target=TARGETS[target], options=options), options["num_warps"])


def specialisation(kernel, given: tuple, named: dict) -> tuple[dict, dict, dict]:
    """What of its arguments a kernel is compiled for: another of it is another compilation."""
    values = dict(zip(kernel.arg_names, given)) | named
    signature, constants, aligned = {}, {}, {}
    for index, (name, parameter) in enumerate(zip(kernel.arg_names, kernel.params)):
        value, specialised = values[name], not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (specialised and isinstance(value, int) and value == 1):
            signature[name], constants[(index,)] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[name] = f"*{NAMES[value.dtype]}"
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        number = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if isinstance(number, int) and number % 16 == 0 and specialised and not parameter.do_not_specialize_on_alignment:
            aligned[(index,)] = [["tt.divisibility", 16]]
    return signature, constants, aligned


def resources(target: str, compiled, warps: int) -> Resources:
    if target.startswith("gfx"):
        count = {name: int(re.search(rf"\.{name}:\s+(\d+)", compiled.asm["amdgcn"])[1])
                 for name in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")}
        # A scalar register is spilled once for all threads, which counts here as if it were for each.
        spilled = 4 * (count["vgpr_spill_count"] + count["sgpr_spill_count"])
        return Resources(warps, count["vgpr_count"], spilled, compiled.metadata.shared)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [TOOLS / "cuobjdump", "-res-usage", cubin.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = map(int, re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", told).groups())
    return Resources(warps, registers, stack + local, compiled.metadata.shared)
