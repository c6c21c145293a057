"""The two tasks: questions, answers, and which strings training never sees. Knows neither PyTorch nor vLLM.

A question is written as `parity 1 0 1 1 =` or `modular 2 0 2 =`; the answer is the sum of the digits modulo 2 or 3. To
answer for a string of any length, a model has to carry the running sum from digit to digit: a tracked state.
"""

import hashlib
import random
from collections.abc import Sequence

MODULUS = {"parity": 2, "modular": 3}
TRAINED_LENGTH = 24  # training strings have 1 to this many digits

# Strings shorter than this are few, and all of them may be trained on.
SHORTEST_HELD_OUT = 8


def answer(task: str, digits: Sequence[int]) -> int:
    return sum(digits) % MODULUS[task]


def running_answers(task: str, digits: Sequence[int]) -> list[int]:
    """The answer after each digit."""
    return [answer(task, digits[: end + 1]) for end in range(len(digits))]


def prompt(task: str, digits: Sequence[int]) -> str:
    """The question as text; what should follow it is the answer's digit, then the end of the text."""
    return " ".join((task, *map(str, digits), "="))


def is_held_out(task: str, digits: Sequence[int]) -> bool:
    """Whether training must not see this string: half of all that are long enough, chosen by a hash of the question.

    A cryptographic hash, because a plain checksum's bits are sums of the string's bits, as parity is.
    """
    if len(digits) < SHORTEST_HELD_OUT:
        return False
    return hashlib.blake2b(prompt(task, digits).encode(), digest_size=1).digest()[0] % 2 == 1


def training_string(rng: random.Random, task: str, length: int) -> list[int]:
    """A random string that training may see, some digits more frequent in it than others.

    Were all digits equally frequent, a count would be told well enough by the length alone, and a model would learn to
    correct its sums by a clock, which no longer holds for longer strings.
    """
    digits = range(MODULUS[task])
    while True:
        string = rng.choices(digits, [rng.gammavariate(0.5, 1) + 1e-9 for _ in digits], k=length)
        if not is_held_out(task, string):
            return string


def held_out_strings(task: str, length: int, count: int, seed: int = 0) -> list[list[int]]:
    """`count` uniformly random held-out strings of `length` digits each, the same ones for the same seed."""
    if length < SHORTEST_HELD_OUT:
        raise ValueError(f"no string of {length} digits is held out; the shortest have {SHORTEST_HELD_OUT}")
    rng = random.Random(f"{task} {length} {seed}")
    strings = []
    while len(strings) < count:
        string = [rng.randrange(MODULUS[task]) for _ in range(length)]
        if is_held_out(task, string):
            strings.append(string)
    return strings
