"""How the Triton scan cuts packed sequences into segments, interpreted, against Python."""

import random

import pytest
import torch
from interpreted_triton import interpreted

BLOCK = 128  # what the kernel goes through at once


@pytest.fixture(scope="module")
def plan():
    """plan(lengths, computed, tokens, segments): the sequence and the first token of each segment, and the first
    segment of each sequence."""
    with interpreted() as modules:
        def run(lengths, computed, tokens, segments):
            ends = torch.tensor([0, *lengths]).cumsum(0).int()
            computed = None if computed is None else torch.tensor(computed, dtype=torch.int32)
            found = [torch.full((count,), -7, dtype=torch.int32) for count in (segments, segments, len(lengths) + 1)]
            modules["segments"].plan_kernel[(len(lengths),)](ends, computed, *found, segments, tokens, BLOCK)
            return found

        yield run


def expected(lengths, computed, tokens):
    sequences, first_tokens, first_segments, start = [], [], [], 0
    for sequence, length in enumerate(lengths):
        first_segments.append(len(sequences))
        lead = computed[sequence] % tokens if computed else 0
        for token in range(-lead, length, tokens) if length else ():
            sequences.append(sequence)
            first_tokens.append(start + token)
        start += length
    return sequences, first_tokens, [*first_segments, len(sequences)]


def draw(count, longest, seed=0):
    drawn = random.Random(seed)
    return [drawn.choice((0, 1, drawn.randint(0, longest))) for _ in range(count)]


@pytest.mark.parametrize("lengths, computed, tokens", [
    ([1], None, 8), ([0, 0], None, 8), ([8, 9, 7, 0, 16], None, 8),
    (draw(300, 40), None, 8),  # more sequences than a block
    (draw(300, 40), draw(300, 1000, 1), 8),
    ([2000], [3], 8), ([3, 2000, 1], [0, 13, 8], 8),  # more segments than a block, of one sequence
    ([1] * 9, [7] * 9, 8), ([2] * 9, [7] * 9, 8),  # as many as there can be: two of a sequence of two tokens
    ([1] * 200, [0] * 200, 8),  # most are left over
], ids=str)
def test_every_token_is_in_one_segment(plan, lengths, computed, tokens):
    segments = sum(lengths) // tokens + len(lengths) * (1 if computed is None else 2)
    sequence_of, first_token, first_segment = plan(lengths, computed, tokens, segments)
    sequences, first_tokens, first_segments = expected(lengths, computed, tokens)
    assert len(sequences) <= segments
    assert sequence_of.tolist() == sequences + [-1] * (segments - len(sequences))
    assert first_token[: len(sequences)].tolist() == first_tokens
    assert first_segment.tolist() == first_segments


def test_left_over_segments_beyond_a_block(plan):
    sequence_of, _, first_segment = plan([5], None, 8, 3 * BLOCK + 5)
    assert sequence_of.tolist() == [0] + [-1] * (3 * BLOCK + 4) and first_segment.tolist() == [0, 1]
