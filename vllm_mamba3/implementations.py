"""Which implementation of step and scan an engine uses: the device's, or the one that the environment names."""

import os
from functools import cache
from importlib import import_module

from vllm.logger import init_logger
from vllm.platforms import current_platform

logger = init_logger("vllm.plugins.mamba3")


@cache  # chosen and logged once a process
def chosen_implementation(operation: str) -> str:
    """The implementation of "step" or "scan": VLLM_MAMBA3_STEP or VLLM_MAMBA3_SCAN where it is set, else the device's.

    Raises:
        ValueError: there is none of that name, it does not run on the device, or what it needs is not installed.
    """
    variable = f"VLLM_MAMBA3_{operation.upper()}"
    module = import_module(f"vllm_mamba3.kernels.{operation}")  # here, since registering shall not import the kernels
    device = current_platform.device_type
    name = os.environ.get(variable) or module.default_implementation(device)
    if name not in module.IMPLEMENTATIONS:
        raise ValueError(f"{variable} is {name!r}; it must be one of {', '.join(module.IMPLEMENTATIONS)}.")
    module.check_available(name, device)
    logger.info("Mamba-3 %s: %s%s", operation, name, f" ({variable})" if os.environ.get(variable) else "")
    return name
