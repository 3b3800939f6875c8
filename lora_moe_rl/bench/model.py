"""The model of a benchmark: the tiny Qwen3-MoE shape with random weights and no end of sequence."""

from __future__ import annotations

import json
from pathlib import Path


def make_model(folder: Path) -> int:
    """Writes a Hugging Face directory, the same weights each time; returns the parameter count.

    Without an end-of-sequence token no response can end before the length limit, so that every
    step is the same work.
    """
    import torch
    from transformers.utils.logging import disable_progress_bar

    from lora_moe_rl.tiny.shapes import build_model
    from lora_moe_rl.tiny.tokenizer import make_tokenizer

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build_model("qwen3_moe")
    disable_progress_bar()
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text()) | {"eos_token_id": None}
    config_file.write_text(json.dumps(config, indent=2) + "\n")
    return sum(parameter.numel() for parameter in model.parameters())
