"""Random layers and rows of the scale that a trained layer sees, the same for the same seed."""

import torch

from vllm_mamba3.kernels import Mamba3Layout, Mamba3States, Mamba3Weights

SISO_187M = Mamba3Layout(num_heads=24, head_dim=64, state_size=128, num_groups=1, num_angles=32)
MIMO_187M = Mamba3Layout(num_heads=24, head_dim=64, state_size=128, num_groups=1, num_angles=32, rank=4, is_mimo=True)


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
