"""The scan in Triton, parallel over segments of all sequences, heads and sequences. Mirrors `kernels/reference.py`.

A sequence is cut into segments of some chunks, and the chunks of a segment are walked one after another with the state
in registers. So that all segments can be walked at once, each learns first what it starts from:

    plan_kernel      which sequence each segment belongs to, and where it starts
    rates_kernel     how fast angles turn, which all heads share
    turns_kernel     by how much angles turn within each segment
    angles_kernel    the angle each segment starts with, and the angle states
    added_kernel     what each segment adds to the ssm state, from none
    states_kernel    the ssm state each segment starts with
    outputs_kernel   the outputs, and the states ssm, k and v

What that costs beside one walk is the keys and the states' updates once more, for segments that are not a sequence's
last; what it takes of memory is a state a segment and head.
"""

import math
from contextlib import nullcontext

import torch
import triton

from vllm_mamba3.kernels.layout import Mamba3States, Mamba3Weights
from vllm_mamba3.kernels.scan.chunk_outputs import outputs_kernel
from vllm_mamba3.kernels.scan.launch import launch_for
from vllm_mamba3.kernels.scan.segment_angles import angles_kernel, rates_kernel, turns_kernel
from vllm_mamba3.kernels.scan.segment_states import added_kernel, states_kernel
from vllm_mamba3.kernels.scan.segments import plan_kernel
from vllm_mamba3.kernels.triton_checks import check_triton_call

# How many bfloat16 hold a number: all of a float32, what shows in 16 bits, and exactly.
WHOLE, ROUNDED, EXACT = 3, 2, {torch.float32: 3, torch.float16: 2, torch.bfloat16: 1}


def check_supported(projected, weights, pools, out) -> None:
    """Refuse what `mamba3_scan` can ask for and this cannot do."""
    check_triton_call("mamba3_scan", outputs_kernel, projected, weights, pools, out)


def triton_scan(projected: torch.Tensor, weights: Mamba3Weights, pools: Mamba3States, slots: torch.Tensor,
                cu_seqlens: torch.Tensor, has_initial_state: torch.Tensor, out: torch.Tensor,
                num_computed_tokens: torch.Tensor | None = None) -> None:
    """`mamba3_scan`, without its checks."""
    size, device, dtype = weights.layout, projected.device, projected.dtype
    launch, sequences, heads = launch_for(size), len(slots), size.num_heads
    tokens = launch.tokens(size)
    slots, cu_seqlens, has_initial_state = slots.contiguous(), cu_seqlens.contiguous(), has_initial_state.contiguous()
    segments = len(projected) // tokens + sequences  # each sequence has at most one that is not full, its last,
    if num_computed_tokens is not None:  # or two: its first as well
        num_computed_tokens, segments = num_computed_tokens.contiguous(), segments + sequences
    pairs, block_p = max(16, _power(-(-size.state_size // 2))), max(16, _power(size.head_dim))
    # Where rows lie at multiples of 16 bytes the compiler is told, and loads so many at a time.
    unit = math.gcd(projected.stride(0), 16 // projected.element_size())
    sizes = dict(H=heads, P=size.head_dim, N=size.state_size, G=size.num_groups, R=size.rank, UNIT=unit)
    angles = dict(ANGLES=size.num_angles, BLOCK_A=_power(size.num_angles), num_warps=4)
    parts = WHOLE if dtype == torch.float32 else ROUNDED
    chunks = sizes | dict(
        ANGLES=size.num_angles, HALVES=size.is_mimo, SOFTPLUS=weights.A_activation == "softplus", TOKENS=tokens,
        ROWS=launch.rows, BLOCK_P=block_p, PAIRS=pairs, BLOCK_R=_power(size.rank), PARTS=parts,
        PARTS_OF_K=EXACT[dtype], num_warps=launch.warps, num_stages=1,
    )

    def empty(*shape, of=torch.float32):
        return torch.empty(shape, dtype=of, device=device)

    sequence_of, first_token = empty(segments, of=torch.int32), empty(segments, of=torch.int32)
    first_segment = empty(sequences + 1, of=torch.int32)
    rates = empty(len(projected), size.num_angles + 1)
    turned, starts = (empty(segments, heads, size.num_angles, of=torch.int32) for _ in range(2))
    states, decay = empty(segments, heads, 2, size.head_dim, pairs), empty(segments, heads)
    given = projected, projected.stride(0) // unit
    of_segments = cu_seqlens, sequence_of, first_token
    pool_strides = [pool.stride(0) for pool in pools]
    with torch.cuda.device(device) if projected.is_cuda else nullcontext():
        plan_kernel[(sequences,)](cu_seqlens, num_computed_tokens, sequence_of, first_token, first_segment, segments,
                                  TOKENS=tokens, BLOCK=128, num_warps=4)
        rates_kernel[(triton.cdiv(len(projected), 64),)](*given, rates, len(projected), **sizes, **angles, BLOCK_T=64)
        turns_kernel[(segments, heads)](*given, rates, *of_segments, turned, weights.dt_bias, **sizes, **angles,
                                        TOKENS=tokens, BLOCK_T=min(64, tokens))
        angles_kernel[(sequences, heads)](turned, starts, first_segment, slots, has_initial_state, pools.angle,
                                          pool_strides[0], **angles, H=heads, BLOCK_S=16)
        added_kernel[(segments, heads)](
            *given, rates, *of_segments, slots, starts, states, decay, weights.dt_bias, weights.B_bias, weights.B_norm,
            weights.mimo_x, weights.A_floor, weights.norm_eps, pools.k, **chunks)
        states_kernel[(sequences, heads, 2 * triton.cdiv(size.head_dim, 16))](
            *given, cu_seqlens, first_segment, slots, has_initial_state, states, decay, weights.dt_bias,
            weights.mimo_x, *pools, *pool_strides, **sizes, ANGLES=size.num_angles, HALVES=size.is_mimo, BLOCK_P=16,
            PAIRS=pairs, num_warps=4, num_stages=1)
        outputs_kernel[(segments, heads)](
            *given, out, out.stride(0), rates, *of_segments, slots, starts, states, *pools[1:], *pool_strides[1:],
            *weights.tensors(), weights.A_floor, weights.norm_eps, **chunks,
            PARTS_OF_V=EXACT[dtype] if weights.mimo_x is None else parts)


def _power(count: int) -> int:
    return triton.next_power_of_2(count)
