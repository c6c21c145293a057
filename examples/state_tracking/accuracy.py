# python examples/state_tracking/accuracy.py examples/state_tracking/siso examples/state_tracking/mimo
"""How often a model answers held-out strings: the right digit after `=`, and then the end of the text."""

import argparse
from pathlib import Path

import torch

from model import LanguageModel, load
from tasks import MODULUS, TRAINED_LENGTH, answer, held_out_strings, prompt
from tokenizer import END, TOKEN_ID

FACTORS = (1, 2, 4)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BATCH = 50


@torch.no_grad()
def accuracy(model: LanguageModel, task: str, length: int, count: int, dtype: torch.dtype) -> float:
    """The fraction of `count` held-out strings of `length` digits that the model answers, run in `dtype`."""
    right = 0
    strings = held_out_strings(task, length, count)
    for start in range(0, count, BATCH):
        batch = strings[start : start + BATCH]
        rows = [[TOKEN_ID[word] for word in (*prompt(task, digits).split(), str(answer(task, digits)))]
                for digits in batch]
        logits = model(torch.tensor(rows).flatten(), [len(row) for row in rows], dtype).unflatten(0, (len(rows), -1))
        wanted = torch.tensor([[row[-1], TOKEN_ID[END]] for row in rows])
        right += (logits[:, -2:].argmax(-1) == wanted).all(-1).sum().item()
    return right / count


def table(model: LanguageModel, count: int = 300, dtypes: tuple[str, ...] = tuple(DTYPES)) -> str:
    """A Markdown table of accuracies by task, dtype and length, as a multiple of the trained one."""
    lines = [
        "| task | dtype | " + " | ".join(f"{factor}× ({factor * TRAINED_LENGTH} digits)" for factor in FACTORS) + " |",
        "| --- | --- |" + " --- |" * len(FACTORS),
    ]
    for task in MODULUS:
        for dtype in dtypes:
            row = [accuracy(model, task, factor * TRAINED_LENGTH, count, DTYPES[dtype]) for factor in FACTORS]
            lines.append(f"| {task} | {dtype} | " + " | ".join(f"{value:.3f}" for value in row) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoints", nargs="+", type=Path)
    parser.add_argument("--count", type=int, default=300, help="strings for each figure")
    args = parser.parse_args()
    for folder in args.checkpoints:
        print(f"{folder.name}, {args.count} held-out strings for each figure\n\n{table(load(folder), args.count)}\n")


if __name__ == "__main__":
    main()
