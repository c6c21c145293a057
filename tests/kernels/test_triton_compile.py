"""The Triton step compiled ahead of time, for GPUs that are not there: it fits on them all."""

import pytest

from vllm_mamba3.kernels import Mamba3Layout

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
LAYOUTS = {
    "siso-187m": Mamba3Layout(24, 64, 128, 1, 32),
    "siso-1.5b": Mamba3Layout(64, 64, 128, 1, 32),
    "mimo-187m": Mamba3Layout(24, 64, 128, 1, 32, 4, True),
    "mimo-1.5b": Mamba3Layout(64, 64, 128, 1, 32, 4, True),
}
OTHERS = {
    "float32 rows": dict(dtype="float32"),
    "float16 state": dict(dtype="float16", ssm_dtype="float16"),
    "bfloat16 state": dict(ssm_dtype="bfloat16"),
    "stochastic rounding": dict(ssm_dtype="float16", stochastic=True),
    "output norm": dict(out_norm=True),
    "several tokens": dict(several=True),
}
MOST_SHARED = 99 * 1024  # bytes; what a consumer GPU has for a program


@pytest.fixture(scope="module")
def compile_step(tmp_path_factory):
    pytest.importorskip("triton", reason="Triton is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        import compile_ahead

        if not (compile_ahead.TOOLS / "ptxas").exists():
            pytest.skip("this Triton comes without ptxas")

        def compile_and_print(target, *arguments, **keywords):
            used = compile_ahead.compile_step(target, *arguments, **keywords)
            print(f"{target}: {used.registers} registers, {used.spilled} bytes spilled, {used.shared} bytes shared")
            return used

        yield compile_and_print


# Of the two sizes of SISO and of MIMO, all targets compile the smaller, and sm_90 both.
@pytest.mark.parametrize("target, name", [
    *((target, f"{kind}-187m") for kind in ("siso", "mimo") for target in TARGETS),
    ("sm_90", "siso-1.5b"), ("sm_90", "mimo-1.5b")])
def test_official_shapes(compile_step, target, name):
    used = compile_step(target, LAYOUTS[name])
    assert used.shared <= MOST_SHARED
    if target == "sm_90":
        assert used.spilled == 0


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("layout", [LAYOUTS["siso-187m"], LAYOUTS["mimo-187m"]], ids=["siso", "mimo"])
def test_other_variants(compile_step, layout, change):
    assert compile_step("sm_90", layout, **change).shared <= MOST_SHARED


@pytest.mark.parametrize("target", TARGETS)
def test_odd_sizes(compile_step, target):
    assert compile_step(target, Mamba3Layout(6, 12, 22, 3, 5, 3, True)).shared <= MOST_SHARED


def test_wide_heads(compile_step):
    assert compile_step("sm_90", Mamba3Layout(2, 128, 256, 2, 128)).shared <= MOST_SHARED
