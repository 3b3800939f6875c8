"""What `bench refit` moves: an adapter with the site counts of Qwen3-30B-A3B, and a small base.

The base has Qwen3-30B-A3B's layers, experts and experts a token, and tiny widths; its weights are
random. The trainer ranks have no trainer: they hold random tensors, cut as their layout cuts them.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from lora_moe_rl.adapters import peft
from lora_moe_rl.adapters.peft_config import peft_config
from lora_moe_rl.adapters.sharding import window
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.bench.model import save_random
from lora_moe_rl.config import RunConfig
from lora_moe_rl.refit.parts import PartLayout, SentPart
from lora_moe_rl.refit.plan import Box, trainer_ranks
from lora_moe_rl.refit.sender import Held, Sender
from lora_moe_rl.refit.transports import Channel
from lora_moe_rl.refit.transports.shm import SHARED_MEMORY
from lora_moe_rl.verify.inputs import drawn

LAYERS, EXPERTS, TOP_K = 48, 128, 8
WIDTHS = {
    "hidden_size": 128, "moe_intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 128,
}  # fmt: skip


def save_model(folder: Path) -> None:
    """Writes a Hugging Face directory, bfloat16; no token ends a sequence."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from lora_moe_rl.tiny.tokenizer import VOCAB_SIZE, make_tokenizer

    config = Qwen3MoeConfig(
        **WIDTHS, vocab_size=VOCAB_SIZE, num_hidden_layers=LAYERS, num_experts=EXPERTS,
        num_experts_per_tok=TOP_K, norm_topk_prob=True, max_position_embeddings=4096,
        initializer_range=0.05, dtype=torch.bfloat16, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    save_random(folder, lambda: Qwen3MoeForCausalLM(config).to(torch.bfloat16), {})
    make_tokenizer().save_pretrained(folder)


def random_tensors(spec: AdapterSpec, layer: int) -> dict[str, np.ndarray]:
    """The canonical float32 tensors of a layer, the same each time."""
    sites = [site.name for site in spec if site.layer == layer]
    shapes = {name: s for name, s in spec.tensor_shapes.items() if name[:-2] in sites}
    return drawn(shapes, seed=layer)


def save_adapter(folder: Path, spec: AdapterSpec, config: RunConfig) -> int:
    """The same adapter as a PEFT directory in bfloat16. Returns the number of its tensors."""
    from safetensors.torch import save_file

    tensors = {}
    for layer in range(spec.shape.num_layers):
        tensors |= random_tensors(spec, layer)
    stored = {k: torch.from_numpy(v).bfloat16() for k, v in peft.peft_tensors(spec, tensors)}
    folder.mkdir()
    save_file(stored, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(peft_config(spec, config)))
    return len(stored)


class SendingRank:
    """A trainer rank as a refit knows it, whose adapters are on `device`."""

    def __init__(self, config: RunConfig, spec: AdapterSpec, rank: int, device: str = "cpu"):
        torch.set_num_threads(1)
        self.config, self.spec, self.rank, self.device = config, spec, rank, device

    def prepare_refit(self, layouts: list[PartLayout], channel: Channel = SHARED_MEMORY) -> None:
        scales = {site.name: site.scale for site in self.spec}
        (layout,) = (layout for layout in layouts if layout.source == self.rank)
        outgoing = channel.outgoing(layout, "127.0.0.1")
        self.sender = Sender(layout, self._held(), scales, outgoing)

    def send(self, version: int) -> SentPart:
        return self.sender.send(version)

    def _held(self) -> Held:
        place = trainer_ranks(self.config.trainer, self.spec.shape.num_layers)[self.rank]
        held: dict[str, list[tuple[Box, torch.Tensor]]] = {}
        for layer in sorted(place.layers):
            for name, whole in random_tensors(self.spec, layer).items():
                held[name] = []
                for box in place.layout.boxes(self.spec.by_name[name[:-2]], name[-1]):
                    part = np.ascontiguousarray(whole[window(box.start, box.shape)])
                    held[name].append((box, torch.from_numpy(part).to(self.device)))
        return held
