"""The byte-level tokenizer of the tiny models: 252 bytes and four special tokens."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
VOCAB_SIZE = 256
# Bytes that occur in no UTF-8 text; they make room for the special tokens.
NEVER_IN_UTF8 = (0xC0, 0xC1, 0xFE, 0xFF)

# A turn is "role: content" on a line of its own; the model answers after "assistant: ".
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def token_id(name: str) -> int:
    """The id of a special token; they are the last ids of the vocabulary."""
    return VOCAB_SIZE - len(SPECIAL_TOKENS) + SPECIAL_TOKENS.index(name)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that maps each byte of the text to one id and adds nothing."""
    characters = _byte_characters()
    kept = [characters[byte] for byte in range(256) if byte not in NEVER_IN_UTF8]
    vocab = {character: index for index, character in enumerate(kept)}
    vocab |= {name: token_id(name) for name in SPECIAL_TOKENS}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in table]
    table |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]
