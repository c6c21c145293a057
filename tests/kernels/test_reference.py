"""The reference against arithmetic done by hand, and against what must hold of the recurrence whatever the numbers."""

import math
from dataclasses import replace

import pytest
import torch
from random_layers import VARIANTS, random_projected, random_states, random_weights

from vllm_mamba3.kernels import Mamba3Layout, Mamba3States, Mamba3Weights, reference


def silu(z):
    return z / (1 + math.exp(-z))


def test_two_tokens_by_hand():
    """One head of P = 1 and N = 2 with one angle: two tokens, every factor of the recurrence a number of its own."""
    layout = Mamba3Layout(num_heads=1, head_dim=1, state_size=2, num_groups=1, num_angles=1)
    one = lambda *values: torch.tensor(values, dtype=torch.float64)
    weights = Mamba3Weights(layout, dt_bias=one(0.1), B_bias=one(0.5, -0.5).view(1, 1, 2),
                            C_bias=one(0.25, 1).view(1, 1, 2), B_norm=one(2, 3), C_norm=one(1, 0.5), D=one(0.7))
    tokens = [dict(z=0.3, x=2.0, B=(3, 4), C=(1, -1), dd_dt=0.2, dd_A=0.5, trap=0.4, angle=0.6),
              dict(z=-1.0, x=-0.5, B=(1, 0), C=(2, 2), dd_dt=-1.0, dd_A=-2.0, trap=-0.3, angle=-0.9)]
    theta, S, k_before, x_before, outs = 0.0, [0.0, 0.0], (0.0, 0.0), 0.0, []
    for t in tokens:
        dt = math.log1p(math.exp(t["dd_dt"] + 0.1))
        A = -(1 + t["dd_A"]) if t["dd_A"] >= 0 else -1 / (1 - t["dd_A"])
        trapezoid = 1 / (1 + math.exp(-t["trap"]))
        theta = (theta + math.pi * math.tanh(t["angle"]) * dt) % (2 * math.pi)

        def key(pair, norm, bias):
            scale = 1 / math.sqrt((pair[0] ** 2 + pair[1] ** 2) / 2 + 1e-5)
            a, b = pair[0] * scale * norm[0] + bias[0], pair[1] * scale * norm[1] + bias[1]
            return a * math.cos(theta) - b * math.sin(theta), a * math.sin(theta) + b * math.cos(theta)

        k, q = key(t["B"], (2, 3), (0.5, -0.5)), key(t["C"], (1, 0.5), (0.25, 1))
        alpha = math.exp(A * dt)
        S = [alpha * S[i] + trapezoid * dt * t["x"] * k[i] + (1 - trapezoid) * dt * alpha * x_before * k_before[i]
             for i in range(2)]
        outs.append((S[0] * q[0] + S[1] * q[1] + 0.7 * t["x"]) * silu(t["z"]))
        k_before, x_before = k, t["x"]
    rows = [[t["z"], t["x"], *t["B"], *t["C"], t["dd_dt"], t["dd_A"], t["trap"], t["angle"]] for t in tokens]
    out, states = reference.reference(torch.tensor(rows, dtype=torch.float64), weights)
    torch.testing.assert_close(out.flatten(), one(*outs), rtol=1e-13, atol=0)
    torch.testing.assert_close(states.ssm.flatten(), one(*S), rtol=1e-13, atol=0)
    torch.testing.assert_close(states.k.flatten(), one(*k_before), rtol=1e-13, atol=0)
    assert states.angle.item() == pytest.approx(theta, rel=1e-13)
    assert states.v.item() == -0.5


def test_first_token_sees_itself_alone():
    """From zero states S = γ x kᵀ, so that y = γ (k · q) x + D x; here with three ranks, which add up."""
    variant = VARIANTS["mimo-rank-3-all-groups"]
    weights, size = variant.weights(torch.float64), variant.layout
    row = random_projected(size, 1, 1)
    out, states = reference.reference(row, weights)
    z, x, _, C, dd_dt, _, trap, angle = row[0].split(size.projection_widths)
    z, x = z.view(3, 6), x.view(3, 6)
    dt = torch.log1p(torch.exp(dd_dt + weights.dt_bias))
    C = C.view(3, 3, 8)
    C = C / (C.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights.C_norm + weights.C_bias.transpose(0, 1)
    q = reference.rotate(C, math.pi * torch.tanh(angle) * dt[:, None], size)
    dots = torch.einsum("rhn,shn->hrs", q, states.k)  # of rank r's query with rank s's key
    values = x[:, None] * weights.mimo_x  # (H, R, P)
    y = (torch.sigmoid(trap) * dt)[:, None, None] * dots @ values + weights.D[:, None, None] * values
    expected = (y * torch.nn.functional.silu(z[:, None] * weights.mimo_z) * weights.mimo_o).sum(1)
    torch.testing.assert_close(out, expected.view(1, -1), rtol=1e-12, atol=1e-12)
    assert torch.equal(states.v, x)


@pytest.mark.parametrize("dd_A, rate", [(-9.0, 0.1), (-1.0, 0.5), (0.0, 1.0), (1.0, 2.0), (3.0, 4.0)])
def test_heavy_tail(dd_A, rate):
    assert reference.decay_rate(torch.tensor(dd_A).double(), "heavy_tail", 1e-4).item() == pytest.approx(-rate)


@pytest.mark.parametrize("activation", ["heavy_tail", "softplus"])
def test_decay_rate_varies_and_never_exceeds_minus_the_floor(activation):
    A = reference.decay_rate(torch.linspace(-1e6, 50, 1001, dtype=torch.float64), activation, 1e-3)
    assert A.max() == -1e-3
    assert (A.diff() <= 0).all() and A[-1] < -49


def test_angle_stays_in_its_circle():
    layout = Mamba3Layout(2, 2, 8, 1, 4)
    rows = 3 * random_projected(layout, 300, 0)
    states = None
    for row in rows:
        _, states = reference.reference(row[None], random_weights(layout, 0), states)
        assert ((states.angle >= 0) & (states.angle < 2 * math.pi)).all()


@pytest.mark.parametrize("is_mimo, pairs", [(False, [(0, 1), (2, 3), (4, 5)]), (True, [(0, 5), (1, 6), (2, 7)])])
def test_rotated_pairs(is_mimo, pairs):
    """SISO rotates neighbours, MIMO halves; what is beyond the angles stays."""
    layout = Mamba3Layout(1, 1, 10, 1, 3, 1, is_mimo)
    vector, theta = torch.arange(1.0, 11).double().view(1, 1, 10), torch.tensor([[0.3, 1.1, 4.0]]).double()
    expected = vector.clone()
    for (i, j), angle in zip(pairs, theta[0]):
        expected[..., i] = vector[..., i] * angle.cos() - vector[..., j] * angle.sin()
        expected[..., j] = vector[..., i] * angle.sin() + vector[..., j] * angle.cos()
    torch.testing.assert_close(reference.rotate(vector, theta, layout), expected)


def test_mimo_of_rank_one_is_siso_but_for_the_pairs():
    """With mimo weights of one, and the state's columns reordered so that halves become neighbours."""
    mimo = Mamba3Layout(3, 4, 8, 1, 4, 1, is_mimo=True)
    siso = replace(mimo, is_mimo=False)
    weights = random_weights(siso, 0)
    order = torch.arange(8).view(2, 4).t().flatten()  # (0, 4, 1, 5, …): column i of SISO is column order[i] of MIMO
    back = torch.argsort(order)
    ones = torch.ones(3, 1, 4, dtype=torch.float64)
    reordered = {name: getattr(weights, name)[..., back] for name in ("B_bias", "C_bias", "B_norm", "C_norm")}
    mimo_weights = replace(weights, layout=mimo, **reordered, mimo_x=ones, mimo_z=ones, mimo_o=ones)
    rows = random_projected(siso, 20, 1)
    z, x, B, C, *rest = rows.split(siso.projection_widths, -1)
    out, states = reference.reference(rows, weights)
    mimo_out, mimo_states = reference.reference(torch.cat((z, x, B[:, back], C[:, back], *rest), -1), mimo_weights)
    torch.testing.assert_close(mimo_out, out)
    torch.testing.assert_close(mimo_states.ssm[..., order], states.ssm)
    torch.testing.assert_close(mimo_states.k[..., order], states.k)


@pytest.mark.parametrize("name", ["siso-groups-full-rotation", "mimo-rank-2-groups"])
def test_groups_are_repeated_for_their_heads(name):
    """A layer of G groups is the layer with a group for each head whose B and C are repeated."""
    variant = VARIANTS[name]
    size, rows = variant.layout, random_projected(variant.layout, 10, 1)
    z, x, B, C, *rest = rows.split(size.projection_widths, -1)
    repeats = size.num_heads // size.num_groups
    B, C = (t.view(10, size.rank, size.num_groups, -1).repeat_interleave(repeats, 2).flatten(1) for t in (B, C))
    weights = variant.weights(torch.float64)
    out, states = reference.reference(rows, weights)
    repeated = replace(weights, layout=replace(size, num_groups=size.num_heads))
    repeated_out, repeated_states = reference.reference(torch.cat((z, x, B, C, *rest), -1), repeated)
    assert torch.equal(out, repeated_out)
    assert all(map(torch.equal, states, repeated_states))


@pytest.mark.parametrize("name", VARIANTS)
def test_split_anywhere_is_whole(name):
    """Even with k and v rounded to bfloat16: a key is rounded when it is made, not when a sequence is split."""
    variant = VARIANTS[name]
    weights, rows = variant.weights(torch.float64), random_projected(variant.layout, 12, 1)
    initial = Mamba3States(*(state[0] for state in random_states(variant.layout, 1, 2, torch.bfloat16)))
    run = lambda rows, initial: reference.reference(rows, weights, initial, kv_dtype=torch.bfloat16)
    out, states = run(rows, initial)
    for cut in range(13):
        first, between = run(rows[:cut], initial)
        second, after = run(rows[cut:], between)
        assert torch.equal(torch.cat((first, second)), out)
        assert all(map(torch.equal, after, states))
