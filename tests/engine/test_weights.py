"""Checkpoint files as vLLM finds them: formats and shards, and what is wrong with a checkpoint told by name."""

import json

import engines
import pytest
import torch
from independent_model import IndependentModel
from random_checkpoints import config_dict, random_tensors, write_checkpoint
from safetensors.torch import save_file

from vllm_mamba3.checkpoint.config import Mamba3Config
from vllm_mamba3.checkpoint.weights import NORM_WEIGHTS, checkpoint_tensors, load

CONFIG = config_dict({"is_mimo": True, "mimo_rank": 2, "is_outproj_norm": True}, tie_embeddings=False)
PROMPTS = [[5, 3, 96], [0], list(range(60))]


def as_two_bins(folder, tensors):
    names = sorted(tensors)
    for number, part in enumerate((names[::2], names[1::2]), 1):
        torch.save({name: tensors[name] for name in part}, folder / f"pytorch_model-0000{number}-of-00002.bin")


def as_safetensors(folder, tensors):
    save_file(tensors, folder / "model.safetensors")


def as_two_safetensors(folder, tensors):
    names, where = sorted(tensors), {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        where |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


@pytest.mark.parametrize("write", [as_two_bins, as_safetensors, as_two_safetensors])
def test_file_formats(write, tmp_path):
    checkpoint = write_checkpoint(tmp_path, CONFIG)
    model = IndependentModel(checkpoint)
    (checkpoint / "pytorch_model.bin").unlink()
    write(checkpoint, random_tensors(CONFIG, torch.float32))
    with engines.engine(checkpoint, dtype="float32") as llm:
        engines.compare(model, PROMPTS, engines.generate(llm, PROMPTS, 4), 1e-4)


def test_float32_parameters_stay_float32_in_a_bfloat16_model(tmp_path):
    checkpoint = write_checkpoint(tmp_path, CONFIG, dtype=torch.float32)
    tensors = torch.load(checkpoint / "pytorch_model.bin", weights_only=True)
    with engines.engine(checkpoint, dtype="bfloat16") as llm:
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        parameters = dict(worker.model_runner.model.named_parameters())
    for name in ("dt_bias", "B_bias", "C_bias", "D", "mimo_x", "mimo_z", "mimo_o"):
        name = f"backbone.layers.1.mixer.{name}"
        assert parameters[name].dtype == torch.float32 and torch.equal(parameters[name], tensors[name])
    assert parameters["backbone.layers.1.mixer.in_proj.weight"].dtype == torch.bfloat16


def without(name):
    return lambda tensors: tensors.pop(name)


def with_(name, shape, dtype=torch.float32):
    return lambda tensors: tensors.update({name: torch.zeros(shape, dtype=dtype)})


MIXER = "backbone.layers.1.mixer"
FAULTS = {
    "missing": (without(f"{MIXER}.dt_bias"), [r"lacks 1 of the \d+ tensors", rf"{MIXER}.dt_bias \(8,\)"]),
    "missing head": (without("lm_head.weight"), [r"lm_head.weight \(112, 32\)"]),
    "surplus": (with_(f"{MIXER}.conv1d.weight", (3, 4)), [rf"{MIXER}.conv1d.weight, of shape \(3, 4\)"]),
    "of a layer too many": (with_("backbone.layers.2.norm.weight", (32,)), [r"backbone.layers.2.norm.weight"]),
    "misshapen": (with_(f"{MIXER}.D", (9,)), [rf"{MIXER}.D has shape \(9,\)", r"means \(8,\)"]),
    "unpadded": (with_("lm_head.weight", (97, 32)), [r"lm_head.weight has shape \(97, 32\)", r"\(112, 32\)"]),
    "of 8 bits": (with_(f"{MIXER}.D", (8,), torch.float8_e4m3fn), [r"mixer.D is of torch.float8_e4m3fn"]),
    "quantized": (with_(f"{MIXER}.out_proj.weight", (32, 64), torch.int8), [r"out_proj.weight is of torch.int8"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_is_told_by_name(fault):
    change, told = FAULTS[fault]
    tensors = random_tensors(CONFIG, torch.float32)
    change(tensors)
    with pytest.raises(ValueError, match=".*".join(told)):
        load(Parameters(), Mamba3Config.from_mamba_ssm(CONFIG), tensors.items())


@pytest.mark.parametrize("changes, name, reason", [
    ({"ssm": {"is_mimo": False}}, f"{MIXER}.mimo_x", "is_mimo is false"),
    ({"ssm": {"is_outproj_norm": False}}, f"{MIXER}.norm.weight", "is_outproj_norm is false"),
    ({"d_intermediate": 0}, "backbone.layers.1.mlp.fc2.weight", "d_intermediate is 0"),
])
def test_a_tensor_that_the_config_rules_out_is_told_with_the_reason(changes, name, reason):
    ssm = {"is_mimo": True, "mimo_rank": 2, "is_outproj_norm": True} | changes.get("ssm", {})
    config = config_dict(ssm, **{key: value for key, value in changes.items() if key != "ssm"})
    with pytest.raises(ValueError, match=rf"{name}.*\({reason}\)"):
        load(Parameters(), Mamba3Config.from_mamba_ssm(config), [(name, torch.zeros(1))])


def test_a_tied_head_that_is_not_the_embedding():
    config = config_dict(tie_embeddings=True)
    tensors = random_tensors(config, torch.float32)
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    with pytest.raises(ValueError, match="embedding.weight and lm_head.weight differ.*tie_embeddings"):
        load(Parameters(), Mamba3Config.from_mamba_ssm(config), tensors.items())


@pytest.mark.parametrize("with_head", [True, False], ids=["head stored", "head not stored"])
def test_reloaded_weights_are_those_of_the_new_checkpoint(with_head, tmp_path):
    """vLLM gives a tied head a parameter of its own while it reloads."""
    config = config_dict()
    first, second = (write_checkpoint(tmp_path / str(seed), config, seed=seed) for seed in (0, 1))
    model = IndependentModel(second)
    if not with_head:
        tensors = random_tensors(config, torch.float32, 1)
        tensors.pop("lm_head.weight")
        torch.save(tensors, second / "pytorch_model.bin")
    with engines.engine(first, dtype="float32") as llm:
        engines.compare(IndependentModel(first), PROMPTS, engines.generate(llm, PROMPTS, 4), 1e-4)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(second)})
        engines.compare(model, PROMPTS, engines.generate(llm, PROMPTS, 4), 1e-4)


def test_a_tensor_there_twice():
    tensor = ("backbone.norm_f.weight", torch.zeros(32))
    with pytest.raises(ValueError, match="backbone.norm_f.weight twice"):
        load(Parameters(), Mamba3Config.from_mamba_ssm(CONFIG), [tensor, tensor])


def test_a_faulty_checkpoint_ends_the_start_with_the_sentence(tmp_path):
    checkpoint = write_checkpoint(tmp_path, CONFIG)
    tensors = torch.load(checkpoint / "pytorch_model.bin", weights_only=True)
    FAULTS["misshapen"][0](tensors)
    torch.save(tensors, checkpoint / "pytorch_model.bin")
    with pytest.raises(ValueError, match=rf"{MIXER}.D has shape \(9,\)"), engines.engine(checkpoint, dtype="float32"):
        pass


class Parameters(torch.nn.Module):
    """A parameter for every tensor of CONFIG, which takes whatever is loaded into it."""

    def named_parameters(self, *arguments, **settings):
        for name in checkpoint_tensors(Mamba3Config.from_mamba_ssm(CONFIG)):
            for stored, ours in NORM_WEIGHTS.items():
                name = name.removesuffix(stored) + ours if name.endswith(stored) else name
            parameter = torch.nn.Parameter(torch.zeros(1))
            parameter.weight_loader = lambda *loaded: None
            yield name, parameter
