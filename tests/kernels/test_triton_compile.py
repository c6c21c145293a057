"""The Triton kernels compiled ahead of time, for GPUs that are not there: they fit on them all. With -s, a table."""

import pytest

from vllm_mamba3.kernels import Mamba3Layout

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
LAYOUTS = {
    "siso-187m": Mamba3Layout(24, 64, 128, 1, 32),
    "siso-1.5b": Mamba3Layout(64, 64, 128, 1, 32),
    "mimo-187m": Mamba3Layout(24, 64, 128, 1, 32, 4, True),
    "mimo-1.5b": Mamba3Layout(64, 64, 128, 1, 32, 4, True),
}
ODD = Mamba3Layout(6, 12, 22, 3, 5, 3, True)
OTHERS = {
    "float32 rows": dict(dtype="float32"),
    "float16 rows and state": dict(dtype="float16", ssm_dtype="float16"),
    "bfloat16 state": dict(ssm_dtype="bfloat16"),
    "stochastic rounding": dict(ssm_dtype="float16", stochastic=True),
    "output norm": dict(out_norm=True),
    "several tokens": dict(several=True),
    "several, stochastic": dict(ssm_dtype="float16", several=True, stochastic=True),
}
MOST_SHARED = 99 * 1024  # bytes; what a consumer GPU has for a program


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    """`compile_ahead`, and rows (target, name, *`Resources`) for the table."""
    pytest.importorskip("triton", reason="Triton is not installed")
    rows = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        import compile_ahead

        if not all((compile_ahead.TOOLS / tool).exists() for tool in ("ptxas", "cuobjdump")):
            pytest.skip("this Triton comes without ptxas or cuobjdump")

        yield compile_ahead, rows
    print(f"\n{'target':8}{'layer':36}{'warps':>6}{'registers':>11}{'spilled':>9}{'shared':>8}")
    for target, name, warps, registers, spilled, shared in rows:
        print(f"{target:8}{name:36}{warps:6}{registers:11}{spilled:9}{shared:8}")


@pytest.fixture
def compile_step(compiler):
    """compile_step(target, name, layout, **what): the step's `Resources`; it notes them down for the table."""
    compile_ahead, rows = compiler

    def compile_and_note(target, name, layout, **what):
        used = compile_ahead.compile_step(target, layout, **what)
        rows.append((target, name, *used))
        return used

    return compile_and_note


# Of the two sizes of SISO and of MIMO, all targets compile the smaller, and sm_90 both: they differ in addresses alone.
@pytest.mark.parametrize("name, target", [
    *((f"{kind}-187m", target) for kind in ("siso", "mimo") for target in TARGETS),
    ("siso-1.5b", "sm_90"), ("mimo-1.5b", "sm_90")])
def test_official_shapes(compile_step, name, target):
    used = compile_step(target, name, LAYOUTS[name])
    assert used.shared <= MOST_SHARED
    assert used.spilled == 0


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("name", ["siso-187m", "mimo-187m"])
def test_other_variants(compile_step, name, what):
    used = compile_step("sm_90", f"{name}, {what}", LAYOUTS[name], **OTHERS[what])
    assert used.shared <= MOST_SHARED
    if not OTHERS[what].get("stochastic"):  # what makes random numbers for a state of 16 bits takes more than there is
        assert used.spilled == 0


@pytest.mark.parametrize("target", TARGETS)
def test_odd_sizes(compile_step, target):
    used = compile_step(target, "odd sizes", ODD)
    assert used.shared <= MOST_SHARED


def test_wide_heads(compile_step):
    assert compile_step("sm_90", "wide heads", Mamba3Layout(2, 128, 256, 2, 128)).shared <= MOST_SHARED


@pytest.mark.parametrize("name, target", [*(("siso-187m", target) for target in TARGETS), ("mimo-187m", "sm_90")])
def test_scan_at_official_shapes(compiler, name, target):
    compile_ahead, rows = compiler
    for kernel, used in compile_ahead.compile_scan(target, LAYOUTS[name]).items():
        rows.append((target, f"{name} scan, {kernel}", *used))
        assert used.shared <= MOST_SHARED, kernel


def test_scan_of_odd_sizes(compiler):
    """In float32, too, where products have more parts."""
    compile_ahead, rows = compiler
    for kernel, used in compile_ahead.compile_scan("sm_90", ODD, dtype="float32", out_norm=True).items():
        rows.append(("sm_90", f"odd sizes scan, {kernel}", *used))
        assert used.shared <= MOST_SHARED, kernel


@pytest.mark.parametrize("name", ["siso-187m", "mimo-187m", "siso-1.5b", "mimo-1.5b"])
def test_no_batch_needs_a_scan_of_its_own(compiler, name):
    """Whatever lengths arrive while serving, what was compiled for others will do."""
    compile_ahead, _ = compiler
    first, *others = (compile_ahead.scan_specialisations(LAYOUTS[name], *batch)
                      for batch in ((64, 1, 0), (1, 1, 0), (1, 1, 3), (16, 16, 16), (17, 2, 1), (700, 5, 7)))
    for other in others:
        for kernel, known in first.items():
            assert other[kernel] == known, kernel


@pytest.mark.parametrize("layout", [*LAYOUTS.values(), ODD, Mamba3Layout(5, 7, 6, 1, 3)],
                         ids=[*LAYOUTS, "odd", "odder"])
def test_what_an_engine_needs_is_compiled_when_it_starts(compiler, layout):
    """Also where a row of the projection or of the output is no multiple of 16 bytes."""
    compile_ahead, _ = compiler
    known = compile_ahead.warmed_up(layout)
    for decodes in range(9):
        for batch in ((64, 1, decodes), (1, 1, decodes), (17, 3, decodes)):
            for kernel, needed in compile_ahead.scan_specialisations(layout, *batch).items():
                assert needed in known[kernel], kernel
