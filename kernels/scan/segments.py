"""Where the work of a packed scan lies: each sequence cut into segments, which are worked on side by side.

Lengths are on the GPU and shall stay there. So the grid is the most segments that there can be, and a kernel notes
which sequence each one belongs to; those that are left over belong to none.
"""

import triton
import triton.language as tl


@triton.jit
def _count(cu_seqlens, computed, sequence, there, TOKENS: tl.constexpr):
    """How many segments sequences have, and by how many tokens their first one starts before their first token."""
    length = tl.load(cu_seqlens + sequence + 1, there, 0) - tl.load(cu_seqlens + sequence, there, 0)
    lead = tl.zeros_like(length)
    if computed is not None:
        lead = tl.load(computed + sequence, there, 0) % TOKENS
    return tl.where(length > 0, (lead + length + TOKENS - 1) // TOKENS, 0), lead


@triton.jit(do_not_specialize=["segments"], do_not_specialize_on_alignment=["cu_seqlens", "computed"])
def plan_kernel(cu_seqlens, computed, sequence_of, first_token, first_segment, segments, TOKENS: tl.constexpr,
                BLOCK: tl.constexpr):
    """Grid: the sequences. Writes the sequence of each segment (segments,), -1 for none; the packed token that it
    starts with (segments,), which lies before the sequence's first where that is within a segment; and the first
    segment of each sequence (sequences + 1,). All are int32."""
    sequence, last = tl.program_id(0), tl.num_programs(0) - 1
    before = 0
    for start in range(0, sequence, BLOCK):
        others = start + tl.arange(0, BLOCK)
        before += tl.sum(_count(cu_seqlens, computed, others, others < sequence, TOKENS)[0])
    itself = sequence + tl.zeros((1,), tl.int32)
    counts, leads = _count(cu_seqlens, computed, itself, itself >= 0, TOKENS)
    count, lead = tl.sum(counts), tl.sum(leads)
    tl.store(first_segment + sequence, before)
    first = tl.load(cu_seqlens + sequence) - lead
    for start in range(0, count, BLOCK):
        segment = start + tl.arange(0, BLOCK)
        tl.store(sequence_of + before + segment, tl.zeros_like(segment) + sequence, segment < count)
        tl.store(first_token + before + segment, first + segment * TOKENS, segment < count)
    if sequence == last:
        tl.store(first_segment + sequence + 1, before + count)
        for start in range(before + count, segments, BLOCK):
            segment = start + tl.arange(0, BLOCK)
            tl.store(sequence_of + segment, tl.full((BLOCK,), -1, tl.int32), segment < segments)
