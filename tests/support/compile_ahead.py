"""The Triton step compiled for GPUs that are not there, and what the compiler says of its resources."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_mamba3.kernels import Mamba3Layout
from vllm_mamba3.kernels.step.launch import launch_for
from vllm_mamba3.kernels.step.triton_step import ROWS_FIRST, step_kernel

TARGETS = {f"sm_{number}": GPUTarget("cuda", number, 32) for number in (80, 86, 89, 90, 100, 120)}
TARGETS["gfx942"] = GPUTarget("hip", "gfx942", 64)
NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Resources(NamedTuple):
    """Of one program: registers a thread, bytes spilled a thread, bytes of shared memory."""

    registers: int
    spilled: int
    shared: int


def compile_step(target: str, layout: Mamba3Layout, dtype: str = "bfloat16", ssm_dtype: str = "float32",
                 several: bool = False, out_norm: bool = False, stochastic: bool = False) -> Resources:
    """Compile the step as `triton_step` launches it: the device's own launch on sm_90, as an H200, else the rule's."""
    import torch

    launch = launch_for("NVIDIA H200" if target == "sm_90" else target, layout, getattr(torch, ssm_dtype))
    sizes = dict(H=layout.num_heads, P=layout.head_dim, N=layout.state_size, G=layout.num_groups,
                 ANGLES=layout.num_angles, R=layout.rank, HALVES=layout.is_mimo, SOFTPLUS=False, INNER=launch.inner,
                 BLOCK_P=triton.next_power_of_2(layout.head_dim), BLOCK_N=triton.next_power_of_2(layout.state_size),
                 BLOCK_R=triton.next_power_of_2(layout.rank), ROWS_FIRST=ROWS_FIRST)
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
    options = {"num_warps": launch.warps}
    if launch.registers and not several and not stochastic:
        options["maxnreg"] = launch.registers
    compiled = triton.compile(source, target=TARGETS[target], options=options)
    if target.startswith("gfx"):
        say = compiled.asm["amdgcn"]
        registers = int(re.search(r"\.vgpr_count:\s+(\d+)", say)[1])
        spilled = 4 * int(re.search(r"\.vgpr_spill_count:\s+(\d+)", say)[1])
        return Resources(registers, spilled, compiled.metadata.shared)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        told = subprocess.run([TOOLS / "cuobjdump", "-res-usage", cubin.name], capture_output=True, text=True, check=True)
    registers, stack, local = map(int, re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", told.stdout).groups())
    return Resources(registers, stack + local, compiled.metadata.shared)
