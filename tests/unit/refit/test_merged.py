"""A merged version in vLLM's own linears, and whether it is seen that they hold something else."""

from __future__ import annotations

import json
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from published_configs import QWEN3_30B_A3B, shrunk
from refit_ranks import make_layouts, make_senders
from safetensors.torch import save_file
from vllm_linears import Attentions, runner, worker

from lora_moe_rl.adapters.families import ModelShape, hf_path
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import AdapterConfig, TrainerConfig
from lora_moe_rl.refit.parts import to_json
from lora_moe_rl.refit.plan import EngineLayout
from lora_moe_rl.refit.transports.shm import SHARED_MEMORY

pytestmark = pytest.mark.seconds  # imports vLLM
CONFIG = shrunk(QWEN3_30B_A3B) | {"num_hidden_layers": 2}
SHAPE = ModelShape.from_hf_config(CONFIG)
SPEC = AdapterSpec.build(SHAPE, AdapterConfig(rank=4, targets=("q_proj", "v_proj", "o_proj")))
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


class Worker:
    """A worker that serves merged weights, and the trainer that sends to it."""

    def __init__(self, linear, folder):
        from lora_moe_rl.refit.merged import MergedReceiver

        draw = torch.Generator().manual_seed(0)
        self.base = {}
        for layer in range(SHAPE.num_layers):
            for name in ATTENTION:
                width, height, _ = SHAPE.modules(layer)[name]
                path = f"model.layers.{layer}.{hf_path(SHAPE, name)}.weight"
                self.base[path] = torch.randn(height, width, generator=draw)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        save_file(self.base, folder / "model.safetensors")
        sizes = [CONFIG[k] for k in ("hidden_size", "head_dim", "num_attention_heads")]
        self.model = Attentions(linear, SHAPE.num_layers, *sizes, CONFIG["num_key_value_heads"])
        self.model.start(self.base.items())
        self.receiver = MergedReceiver()
        self.receiver.rank = 0
        self.receiver.parallel_config = SimpleNamespace(data_parallel_index=0, world_size=1)
        self.receiver.model_runner = runner(self.model, folder)
        self.layouts = make_layouts(SPEC, engine=EngineLayout(8, merged=True))

    def prepare(self) -> dict:
        how = SHARED_MEMORY.to_json(), "stochastic", 0
        return self.receiver.refit_prepare(to_json(self.layouts), *how)

    def publish(self, version: int) -> str:
        """What was sent."""
        draw = np.random.default_rng(version)
        tensors = {
            name: draw.standard_normal(shape, np.float32)
            for name, shape in SPEC.tensor_shapes.items()
        }
        self.senders = make_senders(self.layouts, SPEC, tensors, TrainerConfig())
        sent = json.dumps([asdict(sender.send(version)) for sender in self.senders])
        assert "error" not in self.receiver.refit_stage(version, sent)
        assert "error" not in self.receiver.refit_commit(version)
        return sent

    def write(self, path: str, change) -> None:
        """Other weights into one module."""
        fused = ATTENTION[:3] if path.endswith("qkv_proj") else ATTENTION[3:]
        place = path.rpartition(".")[0]
        names = [f"{place}.{name}.weight" for name in fused]
        values = [(name, change(name, self.base[name])) for name in names]
        self.receiver._refit_weights.load_linear(path, values)


@pytest.fixture
def served(monkeypatch, tmp_path):
    with worker(monkeypatch) as linear:
        yield Worker(linear, tmp_path)


PATHS = [f"model.layers.{i}.self_attn.{name}" for i in (0, 1) for name in ("o_proj", "qkv_proj")]


def test_every_linear_that_does_not_hold_what_was_sent_is_named(served):
    assert sorted(served.prepare()["modules"]) == PATHS
    sent = served.publish(1)
    assert served.receiver.refit_compare(1, sent) == {"differing": []}
    for path in PATHS:
        served.write(path, lambda name, value: value)  # the base
        assert served.receiver.refit_compare(1, sent) == {"differing": [path]}
        sent = served.publish(1)


def test_weights_of_the_version_before_are_named(served):
    served.prepare()
    served.publish(1)
    served.receiver._refit_weights.load_linear = lambda path, weights: None  # writes nothing
    sent = served.publish(2)
    found = served.receiver.refit_compare(2, sent)["differing"]
    assert sorted(found) == PATHS


def test_an_order_of_fused_parts_that_is_not_ours_is_refused_before_training(monkeypatch, tmp_path):
    monkeypatch.setattr(Attentions, "fused", {"q_proj": "q", "k_proj": "v", "v_proj": "k"})
    with worker(monkeypatch) as linear:
        error = Worker(linear, tmp_path).prepare()["error"]
    assert f"{PATHS[1]}: what can be read back of vLLM is not what refit.mode=merged" in error
    assert "model.layers.0.self_attn.k_proj.weight" in error
