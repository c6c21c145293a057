"""The trained checkpoints of the example, run token by token through the Triton step: states of 32 and of 16 bits."""

import sys
from pathlib import Path

import pytest
import torch
from random_layers import Pages
from torch import nn

from vllm_mamba3.kernels import mamba3_step

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "state_tracking"
COUNT = 200


@pytest.fixture(scope="module")
def example():
    sys.path.insert(0, str(EXAMPLE))
    import accuracy
    import model

    yield accuracy, model
    sys.path.remove(str(EXAMPLE))


class SteppingMixer(nn.Module):
    """A mixer of the example whose sequences each get one token a call; every state in a slot of its own."""

    def __init__(self, mixer, mixed, sequences, dtype, ssm_dtype):
        super().__init__()
        self.mixer, self.mixed, self.first = mixer, mixed, True
        self.weights = mixer.weights()
        self.pages = Pages(mixer.layout, dtype, sequences + 1, ssm_dtype, "cuda")
        self.slots = torch.randperm(sequences, device="cuda").int() + 1

    def forward(self, x, lengths):
        projected = self.mixer.in_proj(x)
        out = projected.new_empty(len(x), self.mixer.layout.inner_size)
        goes_on = torch.full((len(x),), not self.first, device="cuda")
        mamba3_step(projected, self.weights, self.pages.pools, self.slots, out, goes_on)
        self.first = False
        return self.mixed(self.mixer.out_proj(out), None)


@pytest.mark.parametrize("kind", ["siso", "mimo"])
@pytest.mark.parametrize("task", ["parity", "modular"])
@pytest.mark.parametrize("dtype, ssm_dtype", [
    (torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float16, torch.float32),
    (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)], ids=str)
@torch.no_grad()
def test_accuracy_at_four_times_the_trained_length(example, kind, task, dtype, ssm_dtype):
    accuracy, module = example

    def stepping(tokens, lengths, dtype):
        """Logits of packed sequences of one length, as `LanguageModel.forward`'s."""
        model = module.load(EXAMPLE / kind).cuda()
        for layer in model.backbone.layers:
            layer.mixer = SteppingMixer(layer.mixer, module.Mixed, len(lengths), dtype, ssm_dtype)
        columns = tokens.cuda().unflatten(0, (len(lengths), -1)).unbind(1)
        return torch.stack([model(column, [1] * len(lengths), dtype) for column in columns], 1).flatten(0, 1).cpu()

    found = accuracy.accuracy(stepping, task, 4 * accuracy.TRAINED_LENGTH, COUNT, dtype)
    print(f"{kind} {task} {dtype} ssm {ssm_dtype}: {found:.3f}")
    assert found >= 0.99
