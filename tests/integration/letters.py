"""A tokenizer of pairs of letters, with which a text may end inside a token or over two of them."""

from __future__ import annotations

import itertools

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

LETTERS = "abcdefghijklmnop"
# Each in one token of two letters, or over two tokens, and then it ends inside the second; the last
# is of a special token.
STOPS = ("ab", "cd", "efgh", "ij", "kl", "mn", "op", "<one>")


def letters_in_pairs() -> PreTrainedTokenizerFast:
    names = ["".join(pair) for pair in itertools.product(LETTERS, repeat=2)]
    vocab = {name: number for number, name in enumerate(names[:250])}
    vocab |= {"<one>": 250, "<two>": 251, "<pad>": 252, "<bos>": 253, "<eos>": 254, "<unk>": 255}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<one>", "<two>"],
        clean_up_tokenization_spaces=False,
    )
