# python examples/state_tracking/train.py siso --out /tmp/siso               (or mimo; writes a checkpoint)
# python examples/state_tracking/train.py siso --no-rotation                 (the same model with its angle zeroed)
"""Trains a small Mamba-3 on parity and on addition modulo 3, and prints how it answers held-out strings.

Deterministic for a seed and a number of threads. The same model serves both tasks, told apart by the question's first
word. At each digit it is asked for the running answer, at `=` for the answer, and at the answer for the end.
"""

import argparse
import math
import random
import time
from pathlib import Path

import torch
from torch.nn import functional as F

from accuracy import table
from model import LanguageModel, save
from tasks import MODULUS, TRAINED_LENGTH, prompt, running_answers, training_string
from tokenizer import END, TOKEN_ID, WORDS, write_tokenizer

COMMON = {"n_layer": 2, "d_model": 64, "d_intermediate": 128, "vocab_size": len(WORDS)}
SSM = {"layer": "Mamba3", "expand": 2, "headdim": 32, "ngroups": 1, "dt_min": 0.1, "dt_max": 1.0, "dt_init_floor": 1e-4,
       "A_floor": 1e-4, "is_outproj_norm": False}
REST = {"attn_layer_idx": [], "attn_cfg": {}, "rms_norm": True, "residual_in_fp32": True, "fused_add_norm": False,
        "pad_vocab_size_multiple": 16, "tie_embeddings": True}
CONFIGS = {
    "siso": COMMON | {"ssm_cfg": SSM | {"d_state": 8, "rope_fraction": 1.0, "chunk_size": 64, "is_mimo": False}} | REST,
    "mimo": COMMON | {"ssm_cfg": SSM | {"d_state": 8, "rope_fraction": 1.0, "chunk_size": 32, "is_mimo": True,
                                        "mimo_rank": 2}} | REST,
}

STEPS, BATCH, LEARNING_RATE, WARMUP, WEIGHT_DECAY = 8000, 32, 4e-3, 100, 0.01
# Strings get longer from SHORTEST to TRAINED_LENGTH during this first part of training, and the penalties stronger.
SHORTEST, CURRICULUM = 4, 0.4
BFLOAT16_FROM = 0.8
LABEL_SMOOTHING = 0.1
# An answer is right as long as a rotation is off by less than half the way to the next answer, and the norms behind the
# mixer make up for a state that fades: at the trained lengths the loss sees neither, and at four times the length both
# are fatal. So each costs something of its own, by its logarithm: a tenth of a small error is worth as much as a tenth
# of a large one, down to where it no longer matters.
DRIFT_PENALTY, DRIFT_FLOOR = 0.05, 1e-6
FADING_PENALTY, FADING_FLOOR = 0.03, 1e-3
# And nothing else keeps the mixers' outputs within the range of float16: what follows them is normalised.
SIZE_PENALTY = 1e-5
IGNORED = -100  # cross_entropy's own mark for a position without a target


def example(rng: random.Random, task: str, longest: int) -> tuple[list[int], list[int]]:
    """Token ids of one training string with its answer, and the target at each of them."""
    length = max(rng.randint(1, longest), rng.randint(1, longest))  # the longer of two: long strings say more
    digits = training_string(rng, task, length)
    answers = [str(value) for value in running_answers(task, digits)]
    words = (*prompt(task, digits).split(), answers[-1])
    targets = [IGNORED, *(TOKEN_ID[word] for word in (*answers, answers[-1], END))]
    return [TOKEN_ID[word] for word in words], targets


def spread(vectors: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Sum of the squared distances of `vectors` (T, d) from the means of their groups (T,)."""
    _, group, count = group.unique(return_inverse=True, return_counts=True)
    sums = vectors.new_zeros(len(count), vectors.shape[-1]).index_add(0, group, vectors)
    return (vectors - (sums / count.unsqueeze(-1))[group]).square().sum()


def drift(mixed: torch.Tensor, question: torch.Tensor, running: torch.Tensor) -> torch.Tensor:
    """How much of what a mixer says at a token, beyond what the token is, is not the running answer: 0 to 1.

    A rotation that is off by a little, or a state that fades, says the same answer differently after a few digits than
    after many. Within the trained lengths the layers above can make up for that, so the answers alone leave it be; at
    four times the length nothing does.

    Args: mixed (T, d_model); question (T,), the token and task; running (T,), the answer so far.
    """
    return spread(mixed, question * len(WORDS) + running) / spread(mixed, question)


def batch_loss(model: LanguageModel, examples: list[tuple[list[int], list[int]]], dtype: torch.dtype,
               strictness: float = 1.0) -> torch.Tensor:
    """Cross entropy at the positions that have a target, and the penalties, those for drift and fading times strictness.

    Drift is looked at where there is something to answer, fading at the digits, which are what must not be forgotten.
    """
    tokens = torch.tensor([token for words, _ in examples for token in words])
    targets = torch.tensor([target for _, row in examples for target in row])
    lengths = [len(words) for words, _ in examples]
    mixed = []
    logits = model(tokens, lengths, dtype, mixed)
    loss = F.cross_entropy(logits, targets, ignore_index=IGNORED, label_smoothing=LABEL_SMOOTHING)
    task = torch.tensor([words[0] for words, _ in examples]).repeat_interleave(torch.tensor(lengths))
    asked = (targets != IGNORED) & (targets != TOKEN_ID[END])
    digits = asked & (tokens != TOKEN_ID["="])
    question, running = (task * len(WORDS) + tokens)[asked], targets[asked]
    for out, fading in mixed:
        drifting = torch.log(drift(out[asked].float(), question, running) + DRIFT_FLOOR)
        fading = torch.log(fading[digits].clamp(min=FADING_FLOOR)).mean()
        loss = loss + strictness * (DRIFT_PENALTY * drifting + FADING_PENALTY * fading)
        loss = loss + SIZE_PENALTY * out.float().square().mean()
    return loss


def zero_angles(model: LanguageModel) -> None:
    """Zero the rows of each in_proj that make the angle, its last ones: the states then decay and never rotate."""
    for layer in model.backbone.layers:
        with torch.no_grad():
            layer.mixer.in_proj.weight[-layer.mixer.layout.num_angles :] = 0


def optimizer_for(model: LanguageModel) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices alone, as mamba_ssm asks for dt_bias and D."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.98))


def train(config: dict, steps: int = STEPS, batch: int = BATCH, seed: int = 0, rotation: bool = True,
          report=lambda step, longest, loss: None) -> LanguageModel:
    """Train a model of `config` from scratch; `report` is called after each step."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    model = LanguageModel(config)
    if not rotation:
        zero_angles(model)
    optimizer = optimizer_for(model)
    tasks = tuple(MODULUS)
    for step in range(steps):
        progress = step / steps
        rate = LEARNING_RATE * min(1.0, (step + 1) / WARMUP) * (1 + math.cos(math.pi * progress)) / 2
        for group in optimizer.param_groups:
            group["lr"] = rate
        longest = min(TRAINED_LENGTH, round(SHORTEST + (TRAINED_LENGTH - SHORTEST) * progress / CURRICULUM))
        examples = [example(rng, tasks[index % len(tasks)], longest) for index in range(batch)]
        # Every other step in bfloat16, which is what the model is served in.
        dtype = torch.bfloat16 if progress >= BFLOAT16_FROM and step % 2 else torch.float32
        loss = batch_loss(model, examples, dtype, strictness=min(1.0, progress / CURRICULUM))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if not rotation:
            zero_angles(model)
        report(step, longest, loss.item())
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=CONFIGS)
    parser.add_argument("--out", type=Path, help="folder for the checkpoint and its tokenizer")
    parser.add_argument("--no-rotation", action="store_true", help="zero the angle, all through training")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    started, average = time.monotonic(), None

    def report(step: int, longest: int, loss: float) -> None:
        nonlocal average
        average = loss if average is None else 0.98 * average + 0.02 * loss
        if (step + 1) % 200 == 0:
            seconds = time.monotonic() - started
            print(f"step {step + 1}/{args.steps}, up to {longest} digits, loss {average:.4f}, {seconds:.0f} s",
                  flush=True)

    model = train(CONFIGS[args.kind], args.steps, seed=args.seed, rotation=not args.no_rotation, report=report)
    print("\n" + table(model))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        save(model, args.out)
        write_tokenizer(args.out)


if __name__ == "__main__":
    main()
