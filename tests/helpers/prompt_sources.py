"""Prompts of a tokenizer that every machine has, of at most MAX_TOKENS tokens."""

from lora_moe_rl.config import DataConfig
from lora_moe_rl.data.prompts import PromptSource
from lora_moe_rl.tiny.tokenizer import make_tokenizer

TOKENIZER = make_tokenizer()
MAX_TOKENS = 24


def source(seed=3, **config):
    return PromptSource(DataConfig(**config), TOKENIZER, seed, MAX_TOKENS)


def texts(prompts):
    return [prompt.text for prompt in prompts]
