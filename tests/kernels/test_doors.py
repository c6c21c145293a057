"""What the doors refuse, and what they say: always a ValueError, and never anything written."""

from dataclasses import replace

import pytest
import torch
from random_layers import VARIANTS, Pages, random_projected, random_states

from vllm_mamba3.kernels import Mamba3States, mamba3_scan, mamba3_step

VARIANT = VARIANTS["siso"]  # H = 4, P = 8, N = 16, n = 4: d_in_proj = 112, H·P = 32
SIZE = VARIANT.layout


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def step_arguments():
    """Three sequences, the last of them padding, in pools of six slots."""
    pages = Pages(SIZE, torch.float32, 6)
    for slot in range(6):
        pages.write(slot, random_states(SIZE, 1, slot, torch.float32), 0)
    return dict(projected=random_projected(SIZE, 3, 0, torch.float32), weights=VARIANT.weights(torch.float32),
                states=pages.pools, slots=int32(2, 5, 0), out=torch.zeros(3, 32))


def scan_arguments():
    """Three sequences, the last of them padding, of 2, 4 and 1 tokens."""
    return step_arguments() | dict(projected=random_projected(SIZE, 7, 0, torch.float32), out=torch.zeros(7, 32),
                                   cu_seqlens=int32(0, 2, 6, 7), has_initial_state=torch.tensor([True, False, False]))


def several_arguments():
    """Three sequences, the last of them padding, of 2, 1 and 1 tokens and two slots each."""
    return step_arguments() | dict(
        projected=random_projected(SIZE, 4, 0, torch.float32), out=torch.zeros(4, 32),
        slots=int32([1, 2], [3, 4], [0, 0]), cu_seqlens=int32(0, 2, 3, 4), num_accepted_tokens=int32(1, 2, 1))


def pool(name, change):
    """A change of one of the pools."""
    return lambda a: dict(states=a["states"]._replace(**{name: change(getattr(a["states"], name))}))


def to(**changes):
    return lambda arguments: changes


def with_half(**changes):
    """An ssm state in float16, and other changes."""
    return lambda arguments: pool("ssm", lambda p: p.half())(arguments) | changes


def apart(tensor):
    """The same numbers, with room between neighbours of the last dimension."""
    return torch.stack((tensor, tensor), -1)[..., 0]


META = torch.device("meta")
# What changes, and what the error says, for both operations.
BOTH = {
    "1-D": (lambda a: dict(projected=a["projected"][0]),
        r"a 2-D tensor \(rows, d_in_proj = 112\), and got a 1-D tensor"),
    "width": (lambda a: dict(projected=a["projected"][:, 1:]),
        r"projected to have shape \(\d, 112\), and got shape \(\d, 111\)"),
    "integer rows": (lambda a: dict(projected=a["projected"].int()),
        "projected in bfloat16 or float16 or float32 or float64, and got int32"),
    "out's rows": (lambda a: dict(out=a["out"][1:]), r"out to have shape \(\d, 32\), and got shape"),
    "out's width": (to(out=torch.zeros(3, 4, 8)), r"out to have shape \(\d, 32\), and got shape \(3, 4, 8\)"),
    "out's dtype": (lambda a: dict(out=a["out"].bfloat16()), "out in float32, and got bfloat16"),
    "out's device": (lambda a: dict(out=a["out"].to(META)), "out on cpu, where projected is, and got it on meta"),
    "three pools": (lambda a: dict(states=a["states"][:3]), 
        r"the state pools as Mamba3States \(angle, ssm, k, v\), and got tuple"),
    "no pools": (to(states=None), r"the state pools as Mamba3States \(angle, ssm, k, v\), and got NoneType"),
    "pool missing": (pool("angle", lambda p: None), "the angle pool to be a tensor, and got None"),
    "pool of no slots": (pool("angle", lambda p: p[0, 0, 0]), r"the angle pool to have shape .*, and got shape \(\)"),
    "slots in one place": (pool("ssm", lambda p: p[:1].expand_as(p)), "writes to the ssm pool, and got it expanded"),
    "out in one place": (lambda a: dict(out=a["out"][:1].expand_as(a["out"])), "writes to out, and got it expanded"),
    "no rows": (to(projected=None), "projected to be a tensor, and got None"),
    "no weights": (to(weights=None), "weights as Mamba3Weights, and got NoneType"),
    "slots as a list": (to(slots=[2, 5, 0]), r"slots to be a tensor, and got \[2, 5, 0\]"),
    "pool's shape": (pool("ssm", lambda p: p.transpose(2, 3)), r"the ssm pool to have shape \(6, 4, 8, 16\), and got"),
    "pool's slots": (pool("k", lambda p: p[1:]), r"the k pool to have shape \(6, 1, 4, 16\), and got shape \(5,"),
    "pool's dtype": (pool("v", lambda p: p.bfloat16()), "the v pool in float32, and got bfloat16"),
    "wide ssm": (pool("ssm", lambda p: p.double()),
        "the ssm pool in float32 or bfloat16 or float16, and got float64"),
    "pool's device": (pool("angle", lambda p: p.to(META)),
        "the angle pool on cpu, where projected is, and got it on meta"),
    "weights' device": (lambda a: dict(weights=replace(a["weights"], D=a["weights"].D.to(META))),
        "the weights on cpu, where projected is, and got D on meta"),
    "int64 slots": (to(slots=torch.tensor([2, 5, 0])), "slots in int32, and got int64"),
    "2-D slots": (to(slots=int32(2, 5, 0)[:, None]), r"got (slots of )?shape \(3, 1\)"),
    "slot too high": (to(slots=int32(2, 6, 0)), "got slot 6, and the pools have 6 slots"),
    "slot twice": (to(slots=int32(2, 0, 2)), "a slot of its own for each sequence, and got slot 2 twice"),
    "flags as numbers": (to(has_initial_state=int32(1, 0, 0)), "has_initial_state in bool, and got int32"),
    "flags of two": (to(has_initial_state=torch.tensor([True, False])),
        r"has_initial_state to have shape \(3,\), and got shape \(2,\)"),
    "implementation": (to(implementation="cuda"), "no implementation 'cuda'; it has torch"),
}
STEP = {
    "3-D": (lambda a: dict(projected=a["projected"][:, None]),
        r"got a 3-D tensor of shape \(3, 1, 112\); a step is one token a sequence: pass x\[:, 0\]"),
    "2-D slots alone": (to(slots=int32(2, 5, 0)[:, None]), r"slots \(sequences, tokens\) together with cu_seqlens"),
    "two slots": (to(slots=int32(2, 5)), r"slots to have shape \(3,\), and got shape \(2,\)"),
}
SEED = torch.zeros(1, dtype=torch.int64)
ROUNDING = {
    "ssm in float32": (to(rounding_seed=SEED), "a rounding_seed for an ssm state of 16 bits, and got one in float32"),
    "with torch": (with_half(rounding_seed=SEED, implementation="torch"),
        "a rounding_seed with implementation 'triton', and got it with 'torch'"),
    "two seeds": (with_half(rounding_seed=torch.cat((SEED, SEED))),
        r"rounding_seed to have shape \(1,\), and got shape \(2,\)"),
    "int32 seed": (with_half(rounding_seed=SEED.int()), "rounding_seed in int64, and got int32"),
    "seed as a number": (with_half(rounding_seed=0), "rounding_seed to be a tensor, and got 0"),
    "seed's device": (with_half(rounding_seed=SEED.to(META)),
        "rounding_seed on cpu, where projected is, and got it on meta"),
}
ENDS = r"cu_seqlens to rise from 0 in steps of at most 2, .* to at most the 4 rows of projected, and got "
SEVERAL = {
    "counts without ends": (to(cu_seqlens=None, slots=int32(1, 2, 3, 0)),
        "num_accepted_tokens together with cu_seqlens, and got no cu_seqlens"),
    "1-D slots": (to(slots=int32(1, 2, 0)), r"slots to be a 2-D tensor \(sequences, tokens\) .* got shape \(3,\)"),
    "3-D slots": (to(slots=int32([[1, 2], [0, 0]])), r"slots to be a 2-D tensor .*, and got shape \(1, 2, 2\)"),
    "int64 slots": (to(slots=torch.tensor([[1, 2], [3, 4], [0, 0]])), "slots in int32, and got int64"),
    "slot too high": (to(slots=int32([1, 2], [3, 6], [0, 0])), "got slot 6, and the pools have 6 slots"),
    "slot twice in a sequence": (to(slots=int32([1, 2], [3, 3], [0, 0])), "got slot 3 twice"),
    "slot in two sequences": (to(slots=int32([1, 2], [3, 1], [0, 0])), "got slot 1 twice"),
    "ends of two": (to(cu_seqlens=int32(0, 2, 4)), r"cu_seqlens to have shape \(4,\), and got shape \(3,\)"),
    "int64 ends": (to(cu_seqlens=torch.tensor([0, 2, 3, 4])), "cu_seqlens in int32, and got int64"),
    "ends' device": (to(cu_seqlens=int32(0, 2, 3, 4).to(META)), "cu_seqlens on cpu, .* and got it on meta"),
    "starts late": (to(cu_seqlens=int32(1, 2, 3, 4)), ENDS + r"\[1, 2, 3, 4\]"),
    "too long": (to(cu_seqlens=int32(0, 3, 3, 4)), ENDS + r"\[0, 3, 3, 4\]"),
    "falls": (to(cu_seqlens=int32(0, 2, 1, 2)), ENDS + r"\[0, 2, 1, 2\]"),
    "ends late": (to(cu_seqlens=int32(0, 2, 3, 5)), ENDS + r"\[0, 2, 3, 5\]"),
    "no counts": (to(num_accepted_tokens=None), "num_accepted_tokens to be a tensor, and got None"),
    "counts of two": (to(num_accepted_tokens=int32(1, 2)),
        r"num_accepted_tokens to have shape \(3,\), and got shape \(2,\)"),
    "int64 counts": (to(num_accepted_tokens=torch.tensor([1, 2, 1])), "num_accepted_tokens in int32, and got int64"),
    "none accepted": (to(num_accepted_tokens=int32(1, 0, 1)), r"num_accepted_tokens from 1 to 2, and got \[1, 0, 1\]"),
    "three accepted": (to(num_accepted_tokens=int32(1, 3, 1)), r"num_accepted_tokens from 1 to 2, and got \[1, 3, 1\]"),
    "flags of four": (to(has_initial_state=torch.ones(4, dtype=torch.bool)),
        r"has_initial_state to have shape \(3,\), and got shape \(4,\)"),
    "flags as numbers": (to(has_initial_state=int32(1, 1, 1)), "has_initial_state in bool, and got int32"),
}
WITH = "with implementation 'triton', and got "
TRITON = {
    "rows apart": (lambda a: dict(projected=apart(a["projected"])),
        rf"the columns of projected side by side {WITH}strides \(224, 2\)"),
    "out apart": (lambda a: dict(out=apart(a["out"])), rf"the columns of out side by side {WITH}strides \(64, 2\)"),
    **{f"{name} apart": (pool(name, apart), rf"each slot of the {name} pool to be contiguous {WITH}strides")
       for name in Mamba3States._fields},
    "heads turned": (pool("ssm", lambda p: p.transpose(1, 2).contiguous().transpose(1, 2)),
        rf"each slot of the ssm pool to be contiguous {WITH}strides \(512, 16, 64, 1\)"),
    "on a CPU": (to(), f"tensors on a CUDA or ROCm device {WITH}them on cpu; use 'torch'"),
    "weights apart": (lambda a: dict(weights=replace(a["weights"], C_bias=apart(a["weights"].C_bias))),
        rf"C_bias to be contiguous {WITH}strides \(32, 32, 2\)"),
}
SCAN = {
    "counts of two": (to(num_computed_tokens=int32(1, 2)),
        r"num_computed_tokens to have shape \(3,\), and got shape \(2,\)"),
    "a count below 0": (to(num_computed_tokens=int32(1, -2, 0)),
        r"num_computed_tokens of at least 0, and got \[1, -2, 0\]"),
    "3-D": (lambda a: dict(projected=a["projected"][None]),
        r"got a 3-D tensor of shape \(1, 7, 112\); pack the sequences"),
    "no flags": (to(has_initial_state=None), "has_initial_state to be a tensor, and got None"),
    "two sequences": (to(cu_seqlens=int32(0, 2, 7)), r"cu_seqlens to have shape \(4,\), and got shape \(3,\)"),
    "int64 ends": (to(cu_seqlens=torch.tensor([0, 2, 6, 7])), "cu_seqlens in int32, and got int64"),
    "ends early": (to(cu_seqlens=int32(0, 2, 6, 6)), r"rise from 0 to the 7 rows of projected, and got \[0, 2, 6, 6\]"),
    "ends late": (to(cu_seqlens=int32(0, 2, 6, 8)), r"rise from 0 to the 7 rows of projected, and got \[0, 2, 6, 8\]"),
    "starts late": (to(cu_seqlens=int32(1, 2, 6, 7)),
        r"rise from 0 to the 7 rows of projected, and got \[1, 2, 6, 7\]"),
    "falls": (to(cu_seqlens=int32(0, 6, 2, 7)), r"rise from 0 to the 7 rows of projected, and got \[0, 6, 2, 7\]"),
}


def cases(operation, *tables):
    return [pytest.param(*operation, *case, id=name) for table in tables for name, case in table.items()]


@pytest.mark.parametrize("operation, arguments, change, message", [
    *cases((mamba3_step, step_arguments), BOTH, STEP, ROUNDING), *cases((mamba3_step, several_arguments), SEVERAL),
    *cases((mamba3_scan, scan_arguments), BOTH, SCAN)])
def test_refused(operation, arguments, change, message):
    arguments = arguments()
    before = [pool.clone() for pool in arguments["states"]]
    with pytest.raises(ValueError, match=message) as refusal:
        operation(**arguments | change(arguments))
    assert str(refusal.value).startswith(f"{operation.__name__} ")
    assert all(map(torch.equal, before, arguments["states"])) and not arguments["out"].any()


@pytest.mark.parametrize("operation, arguments, change, message", [
    *cases((mamba3_step, step_arguments), TRITON), *cases((mamba3_scan, scan_arguments), TRITON),
    *cases((mamba3_step, several_arguments), {"several, rows apart": TRITON["rows apart"]})])
def test_refused_in_triton(operation, arguments, change, message):
    """What torch takes."""
    pytest.importorskip("triton", reason="Triton is not installed")
    arguments = arguments()
    arguments |= change(arguments)
    before = [pool.clone() for pool in arguments["states"]]
    with pytest.raises(ValueError, match=f"^{operation.__name__} expects {message}"):
        operation(**arguments, implementation="triton")
    assert all(map(torch.equal, before, arguments["states"])) and not arguments["out"].any()


def test_float64_is_refused_in_triton():
    pytest.importorskip("triton", reason="Triton is not installed")
    pages, out = Pages(SIZE, torch.float64, 2), torch.zeros(1, 32, dtype=torch.float64)
    before = pages.bytes.clone()
    with pytest.raises(ValueError, match="^mamba3_step computes in float32 with implementation 'triton', and got "
                                         "projected in float64; use 'torch'"):
        mamba3_step(random_projected(SIZE, 1, 0), VARIANT.weights(torch.float64), pages.pools, int32(1), out,
                    implementation="triton")
    assert torch.equal(pages.bytes, before) and not out.any()


@pytest.mark.parametrize("operation, arguments", [(mamba3_step, step_arguments), (mamba3_scan, scan_arguments)],
                         ids=["step", "scan"])
class TestTaken:
    def test_strided_rows_and_out(self, operation, arguments):
        """Every other column of something larger: written in place, nothing else touched."""
        plain, strided = arguments(), arguments()
        wide_rows = torch.full((len(plain["out"]), 2 * SIZE.projection_size), torch.nan)
        wide_rows[:, ::2] = plain["projected"]
        wide_out = torch.full((len(plain["out"]), 64), 7.0)
        operation(**plain)
        operation(**strided | dict(projected=wide_rows[:, ::2], out=wide_out[:, ::2]))
        torch.testing.assert_close(wide_out[:, ::2], plain["out"], rtol=1e-6, atol=1e-6)
        assert (wide_out[:, 1::2] == 7).all()
        for a, b in zip(strided["states"], plain["states"]):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)

    def test_pools_with_any_strides(self, operation, arguments):
        """Pools whose heads or columns are not next to one another either are updated in place, not in a copy."""
        plain, strided = arguments(), arguments()
        turned = Mamba3States(*(pool.transpose(0, -1).contiguous().transpose(0, -1) for pool in strided["states"]))
        operation(**plain)
        operation(**strided | dict(states=turned))
        for a, b in zip(turned, plain["states"]):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)

    def test_no_sequences(self, operation, arguments):
        arguments = arguments()
        before = [pool.clone() for pool in arguments["states"]]
        arguments |= dict(projected=arguments["projected"][:0], out=arguments["out"][:0], slots=int32(),
                          has_initial_state=torch.zeros(0, dtype=torch.bool))
        if "cu_seqlens" in arguments:
            arguments["cu_seqlens"] = int32(0)
        operation(**arguments)
        assert all(map(torch.equal, before, arguments["states"]))

    def test_parameters_leave_no_graph_behind(self, operation, arguments):
        arguments = arguments()
        for tensor in arguments["weights"].tensors():
            tensor is None or tensor.requires_grad_()
        operation(**arguments)
        assert not any(tensor.requires_grad for tensor in (arguments["out"], *arguments["states"]))


def test_scan_of_empty_sequences():
    arguments = scan_arguments() | dict(projected=torch.zeros(0, SIZE.projection_size), out=torch.zeros(0, 32),
                                        cu_seqlens=int32(0, 0, 0, 0))
    before = [pool.clone() for pool in arguments["states"]]
    mamba3_scan(**arguments)
    assert all(map(torch.equal, before, arguments["states"]))
