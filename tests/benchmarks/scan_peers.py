"""The prefills that ours is measured against, each on inputs of its own: random, bfloat16.

Every function takes a layer's sizes, a number of sequences and their length, and returns a call that takes them all
through one layer, from no state.
"""

from collections.abc import Callable

import torch
from random_layers import Pages, moved, random_weights
from step_peers import DEVICE, do_without_mamba1, normal

from vllm_mamba3.kernels import Mamba3Layout, mamba3_scan


def ends(sequences: int, length: int) -> torch.Tensor:
    return torch.arange(sequences + 1, dtype=torch.int32, device=DEVICE) * length


def ours(implementation: str) -> Callable:
    """`mamba3_scan`: all between the projections."""
    def make(size: Mamba3Layout, sequences: int, length: int):
        weights = moved(random_weights(size, 0, torch.float32), DEVICE)
        pools = Pages(size, torch.bfloat16, sequences + 1, device=DEVICE, spare=0).pools
        projected, cu_seqlens = normal(sequences * length, size.projection_size), ends(sequences, length)
        slots, goes_on = cu_seqlens[1:] // length, torch.zeros(sequences, dtype=torch.bool, device=DEVICE)
        out = normal(sequences * length, size.inner_size)
        return lambda: mamba3_scan(projected, weights, pools, slots, cu_seqlens, goes_on, out,
                                   implementation=implementation)

    return make


def official_siso(size: Mamba3Layout, sequences: int, length: int):
    """`mamba3_siso_combined`, packed, with final states. Its first call tries its configurations out."""
    if size.is_mimo:
        raise ValueError("the official prefill of MIMO needs TileLang")
    do_without_mamba1()
    from mamba_ssm.ops.triton.mamba3.mamba3_siso_combined import mamba3_siso_combined

    tokens, heads, wide = sequences * length, size.num_heads, dict(dtype=torch.float32)
    q, k = (normal(1, tokens, size.num_groups, size.state_size) for _ in range(2))
    v, z = (normal(1, tokens, heads, size.head_dim) for _ in range(2))
    dt = normal(1, heads, tokens, **wide).abs() / 10
    trap, angles = normal(1, heads, tokens).sigmoid(), normal(1, tokens, heads, size.num_angles)
    bias = [normal(heads, size.state_size, **wide) for _ in range(2)]
    arguments = dict(Q=q, K=k, V=v, ADT=-dt, DT=dt, Trap=trap, Q_bias=bias[0], K_bias=bias[1], Angles=angles,
                     D=normal(heads, **wide), Z=z, return_final_states=True, cu_seqlens=ends(sequences, length))
    return torch.no_grad()(lambda: mamba3_siso_combined(**arguments))


def vllm_mamba2(size: Mamba3Layout, sequences: int, length: int):
    """vLLM's `mamba_chunk_scan_combined_varlen` in chunks of 256 as Mamba-2 calls it, without its convolution."""
    from vllm.model_executor.layers.mamba.ops.ssd_combined import mamba_chunk_scan_combined_varlen

    chunk, tokens, heads = 256, sequences * length, size.num_heads
    a_sequence = -(-length // chunk)
    borders = [sequence * length + min(i * chunk, length) for sequence in range(sequences) for i in range(a_sequence)]
    int32 = dict(dtype=torch.int32, device=DEVICE)
    arguments = dict(
        x=normal(tokens, heads, size.head_dim), dt=normal(tokens, heads), A=-normal(heads, dtype=torch.float32).abs(),
        B=normal(tokens, size.num_groups, size.state_size), C=normal(tokens, size.num_groups, size.state_size),
        chunk_size=chunk, cu_seqlens=ends(sequences, length),
        cu_chunk_seqlens=torch.tensor([*borders, tokens], **int32),
        last_chunk_indices=torch.arange(1, sequences + 1, **int32) * a_sequence - 1,
        seq_idx=torch.arange(sequences, **int32).repeat_interleave(a_sequence),
        out=normal(tokens, heads, size.head_dim), D=normal(heads), dt_bias=normal(heads), dt_softplus=True,
        state_dtype=torch.float32,
    )
    return lambda: mamba_chunk_scan_combined_varlen(**arguments)


PROVIDERS = {"triton": ours("triton"), "torch": ours("torch"), "official Triton": official_siso,
             "vLLM Mamba-2": vllm_mamba2}
