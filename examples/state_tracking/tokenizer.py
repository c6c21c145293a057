"""The tokenizer that ships with the checkpoints: one token a word, nine words."""

import json
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

PAD, UNKNOWN, END = "<pad>", "<unk>", "<eos>"
WORDS = (PAD, UNKNOWN, END, "parity", "modular", "=", "0", "1", "2")
TOKEN_ID = {word: token for token, word in enumerate(WORDS)}


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, which transformers' AutoTokenizer loads."""
    tokenizer = Tokenizer(WordLevel(TOKEN_ID, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([PAD, UNKNOWN, END])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "unk_token": UNKNOWN,
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
