"""A tokenizer in the form of Moonlight's and Kimi-K2's: ranks of bytes in `tiktoken.model`, a class
in a file beside it, and no tokenizer.json."""

from __future__ import annotations

import base64
import json
from pathlib import Path

SPECIAL = ("[BOS]", "[EOS]", "<|im_end|>", "[PAD]")
RESERVED = 5  # ids between the bytes and the special tokens, as published vocabularies have them
FIRST_SPECIAL = 256 + RESERVED

CODE = '''
"""Bytes as ids; special tokens where tokenizer_config.json has them."""

import base64
from pathlib import Path

from transformers.tokenization_utils import PreTrainedTokenizer


class ByteRanksTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tiktoken.model"}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file, **kwargs):
        lines = Path(vocab_file).read_text().split("\\n")
        pairs = [line.split() for line in lines if line]
        self.ranks = {base64.b64decode(token)[0]: int(rank) for token, rank in pairs}
        self.bytes = {rank: byte for byte, rank in self.ranks.items()}
        self.special = {t.content: i for i, t in kwargs["added_tokens_decoder"].items()}
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return VOCAB_SIZE

    def get_vocab(self):
        return {chr(byte): rank for byte, rank in self.ranks.items()} | self.special

    def _tokenize(self, text, **kwargs):
        return [chr(byte) for byte in text.encode()]

    def _convert_token_to_id(self, token):
        return self.special[token] if token in self.special else self.ranks[ord(token)]

    def _convert_id_to_token(self, index):
        return chr(self.bytes[index])

    def convert_tokens_to_string(self, tokens):
        return bytes(ord(token) for token in tokens).decode(errors="replace")
'''


def write(directory: Path, class_name: str = "ByteRanksTokenizer") -> None:
    """Writes the tokenizer's three files into a model's directory. `class_name`: what
    tokenizer_config.json says that the class is called."""
    ranks = [f"{base64.b64encode(bytes([255 - rank])).decode()} {rank}" for rank in range(256)]
    (directory / "tiktoken.model").write_text("\n".join(ranks) + "\n")
    (directory / "tokenization_bytes.py").write_text(
        CODE.replace("VOCAB_SIZE", str(FIRST_SPECIAL + len(SPECIAL)))
    )
    added = {
        str(FIRST_SPECIAL + i): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for i, token in enumerate(SPECIAL)
    }
    config = {
        "added_tokens_decoder": added,
        "additional_special_tokens": ["<|im_end|>"],
        "auto_map": {"AutoTokenizer": ["tokenization_bytes.ByteRanksTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "model_max_length": 1048576,
        "tokenizer_class": class_name,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
