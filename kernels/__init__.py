"""Mamba-3 as mathematics on tensors. Knows PyTorch, and nothing of vLLM."""

from vllm_mamba3.kernels.layout import Mamba3Layout, Mamba3States, Mamba3Weights
from vllm_mamba3.kernels.scan import mamba3_scan
from vllm_mamba3.kernels.scan.torch_scan import chunked_scan
from vllm_mamba3.kernels.step import mamba3_step

__all__ = ["Mamba3Layout", "Mamba3States", "Mamba3Weights", "chunked_scan", "mamba3_scan", "mamba3_step"]
