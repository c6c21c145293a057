"""The Triton kernels under Triton's interpreter: on the CPU, in NumPy, one program after another."""

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from types import ModuleType

import numpy
import torch

SCAN = "vllm_mamba3.kernels.scan."
MODULES = (
    "vllm_mamba3.kernels.triton_math", "vllm_mamba3.kernels.triton_checks", "vllm_mamba3.kernels.step.launch",
    "vllm_mamba3.kernels.step.triton_step",
    "math_kernels", SCAN + "segments", SCAN + "chunk", SCAN + "segment_angles", SCAN + "segment_states",
    SCAN + "chunk_outputs", SCAN + "launch", SCAN + "triton_scan",
)


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
        interpreter = importlib.import_module("triton.runtime.interpreter")
        _round_bfloat16_to_nearest(interpreter)
        _multiply_bfloat16(interpreter)
        _combine_slices(interpreter)
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


def _multiply_bfloat16(interpreter: ModuleType) -> None:
    """The interpreter of Triton 3.9 multiplies the bits of bfloat16 matrices, as integers."""
    language, dot = interpreter.tl, interpreter.InterpreterBuilder.create_dot

    def create_dot(self, a, b, *rest):
        def wide(x):
            if x.dtype.scalar != language.bfloat16:
                return x
            bits = torch.from_numpy(x.data.astype("int32")) << 16
            return interpreter.TensorHandle(bits.view(torch.float32).numpy(), language.float32)

        return dot(self, wide(a), wide(b), *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _combine_slices(interpreter: ModuleType) -> None:
    """Sums and running sums by functions of our own: all of a slice at once, which the interpreter does element by
    element."""
    def combined(self, inputs):
        values = [x.handle.data for x in inputs]
        slices = [tuple(self.to_tensor(value.take(i, self.axis), x.dtype) for value, x in zip(values, inputs))
                  for i in range(values[0].shape[self.axis])]
        found = [slices[0]]
        for part in slices[1:]:
            result = self.combine_fn.fn(*found[-1], *part)
            found.append(result if isinstance(result, tuple) else (result,))
        return [[part[j].handle.data for part in found] for j in range(len(inputs))]

    def generic_reduce(self, inputs):
        assert self.axis is not None and not self.keep_dims
        return [self.to_tensor(parts[-1], x.dtype) for parts, x in zip(combined(self, inputs), inputs)]

    def generic_scan(self, inputs):
        return [self.to_tensor(numpy.stack(parts, self.axis), x.dtype)
                for parts, x in zip(combined(self, inputs), inputs)]

    def cumsum(self, x):  # NumPy's own is of 64 bits
        return [self.to_tensor(x.handle.data.cumsum(self.axis, dtype=x.handle.data.dtype), x.dtype)]

    interpreter.ReduceOps.generic_reduce, interpreter.ScanOps.generic_scan = generic_reduce, generic_scan
    interpreter.ScanOps.cumsum = cumsum


def _forget(name: str) -> ModuleType | None:
    """The module, if it was imported; after this an import makes it anew."""
    parent, _, child = name.rpartition(".")
    if parent.startswith("vllm_mamba3") and hasattr(sys.modules.get(parent), child):
        delattr(sys.modules[parent], child)
    return sys.modules.pop(name, None)
