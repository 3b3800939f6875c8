"""Models of benchmarks, with random weights that are the same each time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def save_random(folder: Path, make: Callable[[], Any], config: Mapping[str, Any]) -> int:
    """Writes the model that `make` draws as a Hugging Face directory, with `config` laid over its
    config.json; returns the parameter count."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make()
    disable_progress_bar()
    model.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(config), indent=2) + "\n")
    return sum(parameter.numel() for parameter in model.parameters())


def deepseek_v3(**sizes: Any):
    """A DeepSeek-V3 of the tiny shape but for `sizes`, in float32, with weights from torch's
    default generator. Its routers prefer no expert yet."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    from lora_moe_rl.tiny.shapes import DEEPSEEK_V3

    return DeepseekV3ForCausalLM(DeepseekV3Config(**DEEPSEEK_V3 | sizes)).float()


def save_tiny(folder: Path, name: str) -> None:
    """The tiny shape of this name, and its tokenizer. It has learned nothing."""
    from lora_moe_rl.tiny.shapes import EXTRA_CONFIG, build_model
    from lora_moe_rl.tiny.tokenizer import make_tokenizer

    save_random(folder, lambda: build_model(name), EXTRA_CONFIG[name])
    make_tokenizer().save_pretrained(folder)


def make_model(folder: Path) -> int:
    """The tiny Qwen3-MoE shape without an end-of-sequence token: no response can end before the
    length limit, so that every step is the same work. Returns the parameter count."""
    from lora_moe_rl.tiny.shapes import build_model
    from lora_moe_rl.tiny.tokenizer import make_tokenizer

    count = save_random(folder, lambda: build_model("qwen3_moe"), {"eos_token_id": None})
    make_tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    return count


def save_with_experts(folder: Path, name: str, experts: int, sizes: Mapping[str, Any]) -> None:
    """The tiny shape of this name with other sizes and so many experts a layer, and a
    tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from lora_moe_rl.tiny.shapes import EXTRA_CONFIG, SHAPES
    from lora_moe_rl.tiny.tokenizer import make_tokenizer

    number = "num_experts" if "num_experts" in SHAPES[name] else "n_routed_experts"
    config = AutoConfig.for_model(name, **SHAPES[name] | dict(sizes) | {number: experts})
    save_random(folder, lambda: AutoModelForCausalLM.from_config(config), EXTRA_CONFIG[name])
    make_tokenizer().save_pretrained(folder)
