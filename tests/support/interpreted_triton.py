"""The Triton kernels under Triton's interpreter: on the CPU, in NumPy, one program after another."""

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from types import ModuleType

import torch

MODULES = ("vllm_mamba3.kernels.triton_math", "vllm_mamba3.kernels.step.triton_step", "math_kernels")


@contextlib.contextmanager
def interpreted() -> Iterator[dict[str, ModuleType]]:
    """Within it `mamba3_step(..., implementation="triton")` is interpreted; after it all is as before.

    Whether a function is compiled or interpreted is settled when it is decorated, also Triton's own, so Triton and our
    kernels are imported anew; all but Triton's compiled library, of which a process can have only one.
    """
    # That library looks up Triton's classes at its first call and keeps them: they shall be those that stay.
    importlib.import_module("triton.runtime.jit").mangle_type(0)
    names = [name for name in sys.modules if name.split(".")[0] == "triton" and not name.startswith("triton._C")]
    before = {name: _forget(name) for name in (*MODULES, *names)}
    setting = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        modules = {name.rpartition(".")[2]: importlib.import_module(name) for name in MODULES}
        _round_bfloat16_to_nearest(importlib.import_module("triton.runtime.interpreter"))
        yield modules
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "triton" and name not in before]:
            name.startswith("triton._C") or _forget(name)
        for name, module in before.items():
            _forget(name)
            if module is not None:
                parent, _, child = name.rpartition(".")
                sys.modules[name] = module
                if parent in sys.modules:
                    setattr(sys.modules[parent], child, module)
        if setting is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = setting


def _round_bfloat16_to_nearest(interpreter: ModuleType) -> None:
    """As a GPU does it; the interpreter of Triton 3.9 drops the lower bits, which doubles every error."""
    language, cast = interpreter.tl, interpreter.InterpreterBuilder.cast_impl

    def cast_impl(self, source, to):
        if (source.dtype.scalar, to.scalar) != (language.float32, language.bfloat16):
            return cast(self, source, to)
        rounded = torch.from_numpy(source.data).to(torch.bfloat16).view(torch.int16).numpy()
        return interpreter.TensorHandle(rounded.view("uint16"), to.scalar)

    interpreter.InterpreterBuilder.cast_impl = cast_impl


def _forget(name: str) -> ModuleType | None:
    """The module, if it was imported; after this an import makes it anew."""
    parent, _, child = name.rpartition(".")
    if parent.startswith("vllm_mamba3") and hasattr(sys.modules.get(parent), child):
        delattr(sys.modules[parent], child)
    return sys.modules.pop(name, None)
