"""Which implementation of step and scan an engine uses: the device's, or the one that the environment names."""

import os
from functools import cache

from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_mamba3.kernels import scan, step

logger = init_logger("vllm.plugins.mamba3")
OPERATIONS = {"step": step, "scan": scan}


@cache  # chosen and logged once a process
def chosen_implementation(operation: str) -> str:
    """The implementation of "step" or "scan": VLLM_MAMBA3_STEP or VLLM_MAMBA3_SCAN where it is set, else the device's.

    Raises:
        ValueError: there is none of that name, or what it needs is not installed.
    """
    variable, module = f"VLLM_MAMBA3_{operation.upper()}", OPERATIONS[operation]
    name = os.environ.get(variable) or module.default_implementation(current_platform.device_type)
    if name not in module.IMPLEMENTATIONS:
        raise ValueError(f"{variable} is {name!r}; it must be one of {', '.join(module.IMPLEMENTATIONS)}.")
    module.check_available(name)
    logger.info("Mamba-3 %s: %s%s", operation, name, f" ({variable})" if os.environ.get(variable) else "")
    return name
