"""A trainer rank on a base with random weights, which needs no files but a config.json."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.trainer import bridge
from lora_moe_rl.trainer.device import Device
from lora_moe_rl.trainer.engine import TrainingEngine
from lora_moe_rl.trainer.model import init_process_groups, make_provider, provide, replicate
from lora_moe_rl.trainer.worker import TrainerWorker
from lora_moe_rl.verify.ranks import free_address

SPREAD = 0.02  # standard deviation of a weight


class RandomEngine(TrainingEngine):
    """The same but for the values of the base: normal, norms 1, routers' corrections 0."""

    def _build(self, model_dir: Path) -> list[torch.nn.Module]:
        source = bridge.load().from_hf_config(AutoConfig.from_pretrained(str(model_dir)))
        trainer, layers = self.config.trainer, self.spec.shape.num_layers
        provider = make_provider(source, trainer, layers, self.device, load=False)
        chunks = provide(provider, self.device)
        replicate(chunks, trainer, self.device)
        for chunk in chunks:
            _draw(chunk)
        return list(chunks)


def start(config: RunConfig, spec: AdapterSpec, model_dir: Path, threads: int) -> TrainerWorker:
    """The only rank of a run, in this process. Nothing of Megatron may be imported before
    `Device.prepare`, which whoever imports this file has to have called."""
    device = Device.choose(config.trainer)
    device.prepare(threads)
    init_process_groups(config.trainer, device, 0, free_address())
    worker = TrainerWorker(config, spec, model_dir, 0)
    worker.use(RandomEngine(config, spec, model_dir, device))
    return worker


@torch.no_grad()
def _draw(chunk: torch.nn.Module) -> None:
    for parameter in chunk.parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0, SPREAD)
    for name, buffer in chunk.named_buffers():
        if name.endswith("expert_bias"):
            buffer.zero_()
