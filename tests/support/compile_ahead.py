"""The Triton step compiled for GPUs that are not there, and what the compiler says of its resources."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_mamba3.kernels import Mamba3Layout
from vllm_mamba3.kernels.step.launch import launch_for
from vllm_mamba3.kernels.step.triton_step import constants_of, step_kernel

TARGETS = {f"sm_{number}": GPUTarget("cuda", number, 32) for number in (80, 86, 89, 90, 100, 120)}
TARGETS["gfx942"] = GPUTarget("hip", "gfx942", 64)
NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Resources(NamedTuple):
    """Of one program: its warps, registers a thread, bytes spilled a thread, bytes of shared memory."""

    warps: int
    registers: int
    spilled: int
    shared: int


def compile_step(target: str, layout: Mamba3Layout, dtype: str = "bfloat16", ssm_dtype: str = "float32",
                 several: bool = False, out_norm: bool = False, stochastic: bool = False) -> Resources:
    """Compile the step as `triton_step` launches it: the device's own launch on sm_90, as an H200, else the rule's."""
    plain = not several and not stochastic
    launch = launch_for("NVIDIA H200" if target == "sm_90" else target, layout, getattr(torch, ssm_dtype), plain)
    sizes = constants_of(layout, "heavy_tail", launch.inner)
    absent = set() if layout.is_mimo else {"mimo_x", "mimo_z", "mimo_o"}
    absent |= set() if several else {"cu_seqlens", "num_accepted_tokens"}
    absent |= set() if out_norm else {"out_norm"}
    absent |= set() if stochastic else {"rounding_seed"}
    kinds = {name: f"*{NAMES[dtype]}" for name in ("projected", "out", "k_pool", "v_pool")}
    kinds |= {"ssm_pool": f"*{NAMES[ssm_dtype]}", "has_initial_state": "*i1", "rounding_seed": "*i64",
              "A_floor": "fp32", "epsilon": "fp32"}
    kinds |= {name: "*i32" for name in ("slots", "cu_seqlens", "num_accepted_tokens")}
    signature, constants, aligned = {}, {}, {}
    for index, name in enumerate(step_kernel.arg_names):
        if name in sizes or name in absent:
            signature[name], constants[(index,)] = "constexpr", sizes.get(name)
            continue
        signature[name] = kinds.get(name, "i32" if name.endswith("stride") else "*fp32")
        if name not in ("slots", "slots_stride", "has_initial_state", "cu_seqlens", "num_accepted_tokens", "A_floor",
                        "epsilon"):
            aligned[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=step_kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=TARGETS[target], options=launch.options())
    if target.startswith("gfx"):
        count = {name: int(re.search(rf"\.{name}:\s+(\d+)", compiled.asm["amdgcn"])[1])
                 for name in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")}
        # A scalar register is spilled once for all threads, which counts here as if it were for each.
        spilled = 4 * (count["vgpr_spill_count"] + count["sgpr_spill_count"])
        return Resources(launch.warps, count["vgpr_count"], spilled, compiled.metadata.shared)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [TOOLS / "cuobjdump", "-res-usage", cubin.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = map(int, re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", told).groups())
    return Resources(launch.warps, registers, stack + local, compiled.metadata.shared)
