"""Mamba-3 for vLLM. vLLM finds `register` through the `vllm.general_plugins` entry point."""

__version__ = "0.1.0"


def register() -> None:
    """Register Mamba-3 with vLLM. Called by vLLM in each of its processes; calling it again changes nothing."""
    from vllm_mamba3.plugin import register_all  # vLLM is imported only when it asks for us

    register_all()
