"""The state-tracking example: its tasks, tokenizer, trainer and the two checkpoints that ship."""

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from accuracy import accuracy
from model import LanguageModel, load, save
from tasks import MODULUS, SHORTEST_HELD_OUT, TRAINED_LENGTH, answer, held_out_strings, is_held_out, prompt
from tasks import running_answers, training_string
from tokenizer import END, TOKEN_ID, WORDS, write_tokenizer
from train import CONFIGS, batch_loss, example, train, zero_angles

FOLDER = Path(__file__).parents[2] / "examples" / "state_tracking"
KINDS = ("siso", "mimo")


@pytest.mark.parametrize(("task", "digits", "expected"), [
    ("parity", [1, 0, 1, 1], 1),
    ("parity", [0], 0),
    ("parity", [1, 1, 0], 0),
    ("modular", [2, 0, 2], 1),
    ("modular", [2], 2),
    ("modular", [2, 1], 0),
])
def test_answers(task, digits, expected):
    assert answer(task, digits) == expected == running_answers(task, digits)[-1]
    assert running_answers(task, digits)[0] == digits[0]


def test_prompt_is_the_documented_one():
    assert prompt("parity", [1, 0, 1, 1]) == "parity 1 0 1 1 ="


@pytest.mark.parametrize("task", MODULUS)
def test_training_never_draws_a_held_out_string(task):
    rng = random.Random(0)
    for length in (1, SHORTEST_HELD_OUT, TRAINED_LENGTH):
        assert not any(is_held_out(task, training_string(rng, task, length)) for _ in range(200))
    strings = held_out_strings(task, SHORTEST_HELD_OUT, 50)
    assert all(is_held_out(task, digits) for digits in strings)
    assert strings == held_out_strings(task, SHORTEST_HELD_OUT, 50)


def test_about_half_of_the_long_strings_are_held_out_whatever_their_answer():
    rng = random.Random(0)
    strings = [[rng.randrange(2) for _ in range(24)] for _ in range(4000)]
    for wanted in (0, 1):
        chosen = [is_held_out("parity", digits) for digits in strings if answer("parity", digits) == wanted]
        assert 0.45 < sum(chosen) / len(chosen) < 0.55


def test_no_string_is_short_and_held_out():
    with pytest.raises(ValueError, match="no string of 7 digits is held out"):
        held_out_strings("parity", 7, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_tokenizer_of_the_checkpoint(kind, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / kind)
    text = prompt("modular", [0, 1, 2])
    ids = tokenizer(text)["input_ids"]
    assert ids == [TOKEN_ID[word] for word in text.split()]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([TOKEN_ID["2"], TOKEN_ID[END]], skip_special_tokens=True).strip() == "2"
    assert tokenizer.eos_token_id == TOKEN_ID[END]
    assert len(tokenizer) == len(WORDS)
    write_tokenizer(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (FOLDER / kind / name).read_text() == (tmp_path / name).read_text()


def expected_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """mamba_ssm's names and shapes, spelled out."""
    ssm, width = config["ssm_cfg"], config["d_model"]
    inner, state, rank = ssm["expand"] * width, ssm["d_state"], ssm.get("mimo_rank", 1) if ssm["is_mimo"] else 1
    heads, head_dim = inner // ssm["headdim"], ssm["headdim"]
    angles = int(state * ssm["rope_fraction"]) // 2
    rows = 2 * inner + 2 * rank * ssm["ngroups"] * state + 3 * heads + angles
    shapes = {"backbone.embedding.weight": (16, width), "lm_head.weight": (16, width), "backbone.norm_f.weight": (width,)}
    layer = {
        "norm.weight": (width,), "norm2.weight": (width,),
        "mlp.fc1.weight": (2 * config["d_intermediate"], width), "mlp.fc2.weight": (width, config["d_intermediate"]),
        "mixer.in_proj.weight": (rows, width), "mixer.out_proj.weight": (width, inner),
        "mixer.dt_bias": (heads,), "mixer.D": (heads,),
        "mixer.B_bias": (heads, rank, state), "mixer.C_bias": (heads, rank, state),
        "mixer.B_norm.weight": (state,), "mixer.C_norm.weight": (state,),
    }
    if ssm["is_mimo"]:
        layer |= {f"mixer.mimo_{name}": (heads, rank, head_dim) for name in "xzo"}
    for index in range(config["n_layer"]):
        shapes |= {f"backbone.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_is_in_mamba_ssm_format(kind):
    config = json.loads((FOLDER / kind / "config.json").read_text())
    assert config == CONFIGS[kind]
    assert not {"architectures", "model_type", "torch_dtype"} & config.keys()
    tensors = torch.load(FOLDER / kind / "pytorch_model.bin", weights_only=True)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected_shapes(config)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert torch.equal(tensors["lm_head.weight"], tensors["backbone.embedding.weight"])
    assert sum(file.stat().st_size for file in (FOLDER / kind).iterdir()) <= 3_000_000


@pytest.mark.parametrize("kind", KINDS)
def test_saved_model_loads_as_it_was(kind, tmp_path):
    torch.manual_seed(0)
    model = LanguageModel(CONFIGS[kind])
    save(model, tmp_path)
    tokens = torch.tensor([TOKEN_ID[word] for word in prompt("parity", [1, 0, 1]).split()])
    with torch.no_grad():
        assert torch.equal(model(tokens, [len(tokens)]), load(tmp_path)(tokens, [len(tokens)]))


@pytest.mark.parametrize("kind", KINDS)
def test_packed_strings_do_not_see_each_other(kind):
    model = load(FOLDER / kind)
    rows = [torch.tensor([TOKEN_ID[word] for word in prompt(task, digits).split()])
            for task, digits in (("parity", [1, 0, 1]), ("modular", [2, 2, 1, 2, 0]), ("parity", [1]))]
    with torch.no_grad():
        packed = model(torch.cat(rows), [len(row) for row in rows]).split([len(row) for row in rows])
        for row, logits in zip(rows, packed):
            torch.testing.assert_close(logits, model(row, [len(row)]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_gets_a_gradient(kind):
    torch.manual_seed(0)
    model, rng = LanguageModel(CONFIGS[kind]), random.Random(0)
    batch_loss(model, [example(rng, task, 8) for task in MODULUS], torch.float32).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_steps_reduce_the_loss(kind):
    losses = []
    train(CONFIGS[kind], steps=30, batch=16, report=lambda step, longest, loss: losses.append(loss))
    assert losses[-1] < losses[0] - 0.5


def test_training_is_reproducible_and_angles_stay_zero_without_rotation():
    first, second = (train(CONFIGS["siso"], steps=3, batch=4, rotation=False) for _ in range(2))
    for a, b in zip(first.parameters(), second.parameters()):
        assert torch.equal(a, b)
    zeroed = [layer.mixer.in_proj.weight.clone() for layer in first.backbone.layers]
    zero_angles(first)
    for layer, before in zip(first.backbone.layers, zeroed):
        angles = layer.mixer.layout.num_angles
        assert torch.equal(layer.mixer.in_proj.weight, before)
        assert not before[-angles:].any() and before[:-angles].any(dim=1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("task", MODULUS)
@pytest.mark.parametrize("kind", KINDS)
def test_answers_held_out_strings_at_four_times_the_trained_length(kind, task, dtype):
    assert accuracy(load(FOLDER / kind), task, 4 * TRAINED_LENGTH, 200, dtype) >= 0.99
