"""Captured runs of the official kernels, where the repository has them beside it (../shared/golden)."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from vllm_mamba3.kernels import Mamba3Layout, Mamba3Weights
from vllm_mamba3.kernels.torch_math import TokenInputs

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "golden"

# ||float64 recurrence - captured|| / ||captured||, as the folder's README gives it: the rounding of a bfloat16 kernel.
ERRORS = {
    "mamba3_siso_combined_00": 4.2e-3,
    "mamba3_siso_combined_01": 8.4e-3,
    "mamba3_siso_combined_04": 1.5e-3,
    "mamba3_siso_combined_05": 2.6e-3,
    "mamba3_siso_combined_06": 2.6e-3,
    "mamba3_siso_combined_07": 2.5e-3,
    "mamba3_mimo_combined_00": 3.9e-3,
    "mamba3_mimo_combined_01": 4.6e-3,
    "mamba3_mimo_combined_04": 3.8e-3,
    "mamba3_mimo_combined_05": 3.9e-3,
    "mamba3_mimo_combined_06": 3.9e-3,
    "mamba3_mimo_combined_08": 3.8e-3,
}


def load(case: str, dtype: torch.dtype) -> tuple[TokenInputs, Mamba3Weights, torch.Tensor]:
    """One captured call: its inputs with leading dimensions (batch, length), its weights, its output (…, H, P)."""
    with np.load(FOLDER / f"{case}.npz") as file:
        arrays = {name: torch.from_numpy(file[name]).to(dtype) for name in file.files}
    mimo = "kw_MIMO_V" in arrays
    B, C = (arrays[name] if mimo else arrays[name].unsqueeze(2) for name in ("kw_K", "kw_Q"))
    bias = {name: arrays[name] if mimo else arrays[name].unsqueeze(1) for name in ("kw_K_bias", "kw_Q_bias")}
    batch, length, heads, head_dim = arrays["kw_V"].shape
    layout = Mamba3Layout(heads, head_dim, B.shape[-1], B.shape[-2], arrays["kw_Angles"].shape[-1], B.shape[-3], mimo)
    mimo_weights = [arrays.get(f"kw_MIMO_{name}") for name in ("V", "Z", "Out")]
    norm = torch.ones(layout.state_size, dtype=dtype)  # B and C were captured after their norms
    weights = Mamba3Weights(layout, torch.zeros(heads, dtype=dtype), bias["kw_K_bias"], bias["kw_Q_bias"], norm, norm,
                            arrays["kw_D"], *mimo_weights)
    dt, A_dt, trap = (arrays[name].transpose(1, 2) for name in ("kw_DT", "kw_ADT", "kw_Trap"))
    inputs = TokenInputs(arrays["kw_Z"], arrays["kw_V"], torch.stack((B, C), 2), dt, A_dt, torch.sigmoid(trap),
                         arrays["kw_Angles"][:, :, 0])
    return inputs, weights, arrays["out"]


def load_rows(case: str) -> tuple[torch.Tensor, Mamba3Weights, torch.Tensor]:
    """One captured call as rows of the fused projection (batch · length, d_in_proj) that our kernels make the same of,
    its weights, and its output (batch, length, H, P); in float64."""
    inputs, weights, captured = load(case, torch.float64)
    flat = type(inputs)(*(tensor.flatten(0, 1) for tensor in inputs))
    rate = -flat.A_dt / flat.dt
    dd_A = torch.where(rate >= 1, rate - 1, 1 - 1 / rate)  # heavy_tail of it is the rate
    columns = flat.z, flat.x, flat.BC, flat.dt.expm1().log(), dd_A, flat.trapezoid.logit(), flat.angle
    norm = torch.full_like(weights.B_norm, 1e6)  # x / sqrt(mean of x² + 1e12) · 1e6 is x: they were captured normed
    weights = replace(weights, B_norm=norm, C_norm=norm, norm_eps=1e12, A_floor=1e-9)
    return torch.cat([part.flatten(1) for part in columns], 1), weights, captured
