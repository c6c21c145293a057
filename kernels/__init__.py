"""Mamba-3 as mathematics on tensors. Knows PyTorch and Triton, and nothing of vLLM."""
