"""What the planner says that autograd keeps, against what it keeps on real Megatron ranks."""

import pytest
import tiny_families
from ranks import run_ranks

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.bench.memory import SEQUENCES, TOKENS, Kept
from lora_moe_rl.config import RunConfig
from lora_moe_rl.planner.facts import find
from lora_moe_rl.planner.trainer import TrainerMemory


def kept(worker, spec):
    """Bytes on one rank."""
    return Kept(worker.engine).bytes


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3_moe", {}),
        ("qwen3_moe", {"world_size": 2, "tp": 2, "ep": 2}),
        ("qwen3_moe", {"world_size": 2, "cp": 2}),
        ("qwen3_moe", {"world_size": 4, "cp": 4, "ep": 2}),
        ("deepseek_v3", {}),
        ("deepseek_v3", {"world_size": 4, "tp": 2, "cp": 2, "ep": 4}),
        ("deepseek_v3", {"world_size": 2, "tp": 2, "ep": 2}),
        ("glm4_moe", {}),
        ("glm4_moe_lite", {}),
        ("qwen2_moe", {}),
        ("olmoe", {"world_size": 2, "tp": 2, "ep": 2}),
    ],
)
def test_autograd_keeps_what_the_plan_says(tmp_path, family, layout):
    """But for copies of the adapters' B, which are no tokens', and uneven experts. Behind the
    layers the last norm keeps its input and the head its slopes, a hidden state a token each."""
    tiny_families.save(family, tmp_path)
    trainer = layout | {"device": "cpu", "micro_batch_tokens": SEQUENCES * TOKENS}
    adapter = {"rank": 4, "alpha": 4}
    config = RunConfig(model=str(tmp_path), trainer=trainer, adapter=adapter)
    facts = find(str(tmp_path))
    spec = AdapterSpec.build(facts.shape, config.adapter, servable=False)
    (planned,) = TrainerMemory(facts, spec, "float32").classes(config)
    tokens = SEQUENCES * TOKENS / config.trainer.cp
    behind = tokens * facts.shape.hidden_size * 4 * (1 / config.trainer.tp + 1)
    wanted = planned.memory["activations"] + behind
    found = run_ranks(config, tmp_path, kept)
    assert sum(found) == pytest.approx(len(found) * wanted, rel=0.03)
