"""What every implementation of the step is tested for, given as a call with the arguments of `mamba3_step`."""

from collections.abc import Callable

import torch
from random_layers import Pages, Variant, assert_close, errors, random_projected, random_states

from vllm_mamba3.kernels import Mamba3States
from vllm_mamba3.kernels.reference import reference

SLOTS = [6, 0, 2, 5, -(2**31), 1, 0]
GOES_ON = [True, True, False, True, False, False, False]


def check_batch_of_sequences(step: Callable, variant: Variant, dtype: torch.dtype, tolerance: float,
                             tokens: int = 4) -> None:
    """Some tokens of sequences that start and that go on, among padding, over pages full of NaN: each gives the
    output and the states of the reference alone, and every byte that belongs to no sequence stays."""
    weights, size = variant.weights(dtype), variant.layout
    padding = [sequence for sequence, slot in enumerate(SLOTS) if slot <= 0]
    pages, initial = Pages(size, dtype, 8), random_states(size, len(SLOTS), 3, dtype)
    for sequence, slot in enumerate(SLOTS):
        if slot > 0 and GOES_ON[sequence]:
            pages.write(slot, initial, sequence)
    used = [slot for slot in SLOTS if slot > 0]
    before = pages.outside(used)
    rows_of = random_projected(size, tokens * len(SLOTS), 1, dtype).view(tokens, len(SLOTS), -1)
    rows_of[:, padding] = torch.nan
    outs = torch.full((tokens, len(SLOTS), size.inner_size), torch.nan, dtype=dtype)
    for token, (rows, out) in enumerate(zip(rows_of, outs)):
        step(rows, weights, pages.pools, torch.tensor(SLOTS, dtype=torch.int32), out,
             None if token else torch.tensor(GOES_ON))

    assert torch.equal(pages.outside(used), before)
    for sequence, slot in enumerate(SLOTS):
        if slot <= 0:
            assert not outs[:, sequence].any()
        else:
            alone = Mamba3States(*(state[sequence] for state in initial)) if GOES_ON[sequence] else None
            expected = reference(rows_of[:, sequence], weights, alone)
            assert_close(tolerance, outs[:, sequence], pages.read(slot), *expected)


def check_keys_are_rounded_first(step: Callable, variant: Variant, dtype: torch.dtype) -> None:
    """A token's key goes into the ssm state as the k state keeps it, in the dtype of the rows: its next token takes
    it from there. Beside the reference that rounds it too, float32's errors are all that is left."""
    weights, size = variant.weights(torch.float32), variant.layout
    rows, pages = random_projected(size, 1, 1, dtype), Pages(size, dtype, 2)
    out = torch.empty(1, size.inner_size, dtype=dtype)
    step(rows, weights, pages.pools, torch.tensor([1], dtype=torch.int32), out, torch.tensor([False]))
    found = errors(out, pages.read(1), *reference(rows, weights, None, torch.float64, dtype))
    assert found["ssm"] < 1e-5, found
