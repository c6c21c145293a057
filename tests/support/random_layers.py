"""Random layers and rows of the scale that a trained layer sees, the same for the same seed; how results compare."""

from dataclasses import replace
from typing import NamedTuple

import torch

from vllm_mamba3.kernels import Mamba3Layout, Mamba3States, Mamba3Weights

SISO_187M = Mamba3Layout(num_heads=24, head_dim=64, state_size=128, num_groups=1, num_angles=32)
MIMO_187M = Mamba3Layout(num_heads=24, head_dim=64, state_size=128, num_groups=1, num_angles=32, rank=4, is_mimo=True)


class Variant(NamedTuple):
    """A layer to test with: its sizes, and what else changes the computation."""

    layout: Mamba3Layout
    out_norm: bool = False
    A_activation: str = "heavy_tail"

    def weights(self, dtype: torch.dtype, seed: int = 0) -> Mamba3Weights:
        return random_weights(self.layout, seed, dtype, self.out_norm, self.A_activation)


# Heads, head_dim, state_size, groups, angles, rank: one group, one a head, and between; full, half and odd rotation.
VARIANTS = {
    "siso": Variant(Mamba3Layout(4, 8, 16, 1, 4)),
    "siso-odd-sizes": Variant(Mamba3Layout(3, 5, 7, 3, 3), out_norm=True),
    "siso-groups-full-rotation": Variant(Mamba3Layout(6, 3, 12, 2, 6), A_activation="softplus"),
    "mimo-rank-1": Variant(Mamba3Layout(2, 7, 10, 1, 5, 1, True), out_norm=True),
    "mimo-rank-2-groups": Variant(Mamba3Layout(4, 5, 12, 2, 3, 2, True), A_activation="softplus"),
    "mimo-rank-3-all-groups": Variant(Mamba3Layout(3, 6, 8, 3, 2, 3, True)),
    "mimo-rank-4": Variant(Mamba3Layout(4, 8, 16, 1, 4, 4, True), out_norm=True),
}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}


def random_weights(layout: Mamba3Layout, seed: int, dtype=torch.float64, out_norm: bool = False,
                   A_activation: str = "heavy_tail") -> Mamba3Weights:
    """A layer's weights: step sizes of about 0.03 to 0.7, everything else near 1."""
    normal = _normal(seed, dtype)
    heads, rank, head_dim, state = layout.num_heads, layout.rank, layout.head_dim, layout.state_size
    mimo = {}
    if layout.is_mimo:
        mimo = {name: 1 / rank + 0.5 * normal(heads, rank, head_dim) for name in ("mimo_x", "mimo_z", "mimo_o")}
    return Mamba3Weights(
        layout, dt_bias=normal(heads) - 2, B_bias=1 + 0.5 * normal(heads, rank, state),
        C_bias=1 + 0.5 * normal(heads, rank, state), B_norm=1 + 0.2 * normal(state), C_norm=1 + 0.2 * normal(state),
        D=1 + 0.2 * normal(heads), **mimo, out_norm=1 + 0.2 * normal(layout.inner_size) if out_norm else None,
        A_activation=A_activation,
    )


def moved(weights: Mamba3Weights, device: str, dtype: torch.dtype = torch.float32) -> Mamba3Weights:
    """A copy of a layer's weights on a device."""
    tensors = zip(weights.TENSORS, weights.tensors())
    return replace(weights, **{name: None if tensor is None else tensor.to(device, dtype, copy=True)
                               for name, tensor in tensors})


def random_projected(layout: Mamba3Layout, rows: int, seed: int, dtype=torch.float64) -> torch.Tensor:
    """Rows of a fused projection (rows, d_in_proj), every column of about unit scale."""
    return _normal(seed, dtype)(rows, layout.projection_size)


def random_states(layout: Mamba3Layout, sequences: int, seed: int, dtype=torch.float64) -> Mamba3States:
    """States of sequences under way, in the dtypes that a model of `dtype` keeps them in."""
    normal, shapes, dtypes = _normal(seed, torch.float64), layout.state_shapes, Mamba3States.dtypes(dtype)
    states = Mamba3States(*(normal(sequences, *shape) for shape in shapes))
    states = states._replace(angle=states.angle.remainder(2 * torch.pi))
    return Mamba3States(*(state.to(kind) for state, kind in zip(states, dtypes)))


def _normal(seed: int, dtype: torch.dtype):
    """Normal variates, rounded from float64: a seed gives the same layer in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


class Pages:
    """State pools as vLLM lays them: one page of bytes a slot, cut into the four states, with `spare` bytes behind each.

    Every byte is 0xFF at first, which is NaN in every floating dtype.
    """

    def __init__(self, layout: Mamba3Layout, dtype: torch.dtype, num_slots: int, ssm_dtype: torch.dtype | None = None,
                 device: str = "cpu", spare: int = 8):
        kinds = Mamba3States.dtypes(dtype, ssm_dtype)
        sizes = [torch.Size(shape).numel() * kind.itemsize for shape, kind in zip(layout.state_shapes, kinds)]
        starts, end = [], 0
        for size in sizes:
            starts.append(end)
            end += size + spare
            end += -end % 8
        self.bytes = torch.full((num_slots, end + -end % 64), -1, dtype=torch.int8, device=device)
        self.pools = Mamba3States(*(
            self.bytes[:, start : start + size].view(kind).unflatten(1, shape)
            for start, size, shape, kind in zip(starts, sizes, layout.state_shapes, kinds)
        ))
        self._states = [slice(start, start + size) for start, size in zip(starts, sizes)]

    def write(self, slot: int, states: Mamba3States, sequence: int):
        for pool, state in zip(self.pools, states):
            pool[slot] = state[sequence]

    def read(self, slot: int) -> Mamba3States:
        return Mamba3States(*(pool[slot].clone() for pool in self.pools))

    def outside(self, slots: list[int]) -> torch.Tensor:
        """A copy of every byte that is not a state of one of these slots."""
        rest = self.bytes.clone()
        for slot in slots:
            for state in self._states:
                rest[slot, state] = 0
        return rest


def errors(out: torch.Tensor, states: Mamba3States, true_out: torch.Tensor,
           true_states: Mamba3States) -> dict[str, float]:
    """||a - b|| / ||b|| of the output and of each state; the angle's difference goes round the circle."""
    turn = 2 * torch.pi
    difference = states.angle.double() - true_states.angle.double()
    found = {"angle": _ratio((difference + turn / 2).remainder(turn) - turn / 2, true_states.angle)}
    for name, a, b in zip(("out", *states._fields), (out, *states), (true_out, *true_states)):
        found.setdefault(name, _ratio(a.double() - b.double(), b))
    return found


def assert_close(tolerance: float, out, states, true_out, true_states):
    """Every error of `errors` is within `tolerance`, and every angle in [0, 2π)."""
    found = errors(out, states, true_out, true_states)
    assert all(error <= tolerance for error in found.values()), found  # NaN fails
    assert ((states.angle >= 0) & (states.angle < 2 * torch.pi)).all()


def _ratio(difference: torch.Tensor, of: torch.Tensor) -> float:
    norm = of.double().norm().item()
    return difference.norm().item() / norm if norm else difference.norm().item()
