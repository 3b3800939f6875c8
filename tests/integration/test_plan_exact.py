"""What the planner predicts of a trainer rank, against what real Megatron ranks hold."""

import pytest
import tiny_families
from quantised import make_pair
from ranks import random_adapter, random_batch, run_ranks

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.planner.base import held_by
from lora_moe_rl.planner.facts import find
from lora_moe_rl.planner.trainer import TrainerMemory
from lora_moe_rl.refit.plan import trainer_ranks

TP2_PP2_EP2 = {"world_size": 4, "tp": 2, "pp": 2, "ep": 2}
COMPARED = ("base", "adapter", "gradients", "optimizer", "host")


def report(worker, spec):
    """(bytes by kind, shape of every parameter of the base under the planner's name) of a rank."""
    worker.engine.optimizer.step()
    if worker.engine.algorithm.from_start:
        worker.set_reference(random_adapter(spec))
    if worker.engine.critic is not None:
        worker.engine.critic.optimizer.step()
    shapes = {}
    for chunk in worker.engine.chunks:
        module = getattr(chunk, "module", chunk)
        numbers = [layer.layer_number - 1 for layer in module.decoder.layers]
        for name, parameter in module.named_parameters():
            if name.rpartition(".")[2] == "A" or ".B." in name:
                continue
            while ".base." in name:
                name = name.replace(".base.", ".")
            if name.startswith("decoder.layers."):
                local, _, rest = name.removeprefix("decoder.layers.").partition(".")
                name = f"decoder.layers.{numbers[int(local)]}.{rest}"
            if ".mlp.experts." in name:
                name = name.rstrip("0123456789")
                before = shapes.get(name, (0,))[0]
                shapes[name] = (before + 1, *parameter.shape)
            else:
                shapes[name] = tuple(parameter.shape)
    return worker.memory(), shapes


@pytest.mark.parametrize(
    ("family", "adapter", "algorithm", "offload"),
    [
        ("deepseek_v3", {"rank": 8, "expert_rank": 4}, "grpo", "none"),
        ("qwen2_moe", {"rank": 8, "init": "olora"}, "ppo", "optimizer"),
        (
            "glm4_moe",
            {"rank": 8, "expert_layout": "shared_outer", "targets": ["*_proj", "exp*"]},
            {"name": "ppo", "kl_coef": 0.1, "reference": "start"},
            "none",
        ),
    ],
)
def test_every_rank_holds_what_the_plan_says(tmp_path, family, adapter, algorithm, offload):
    tiny_families.save(family, tmp_path)
    trainer = TP2_PP2_EP2 | {"device": "cpu", "offload": offload}
    config = RunConfig(model=str(tmp_path), trainer=trainer, adapter=adapter, algorithm=algorithm)
    facts = find(str(tmp_path))
    spec = AdapterSpec.build(facts.shape, config.adapter, servable=False)
    classes = TrainerMemory(facts, spec, "float32").classes(config)
    planned = {stage: c.memory | {"host": c.host} for c in classes for stage in c.stages}
    ranks = trainer_ranks(config.trainer, facts.shape.num_layers)
    for rank, (bytes_held, shapes) in zip(ranks, run_ranks(config, tmp_path, report), strict=True):
        memory = planned[rank.rank // 2]
        assert {"host": 0} | bytes_held == {kind: memory[kind] for kind in COMPARED}
        held = held_by(facts, rank).items()
        assert shapes == {tensor.name: box.shape for tensor, box in held if not tensor.buffer}


def packed_report(worker, spec):
    from lora_moe_rl.trainer import packed_experts

    worker.gradients(*random_batch(spec))
    return worker.memory()["base"], packed_experts.held(worker.engine.chunks)


@pytest.mark.parametrize(
    ("form", "family", "trainer"),
    [
        ("fp8", "deepseek_v3", TP2_PP2_EP2),
        ("fp8", "qwen3_moe", {"world_size": 2, "ep": 2}),
        ("int4", "qwen3_moe", {"world_size": 2, "tp": 2, "etp": 2}),
    ],
)
def test_of_a_quantised_base_packed_bytes_numbers_and_buffers(tmp_path, form, family, trainer):
    folder, _ = make_pair(family, tmp_path, form)
    trainer = trainer | {"device": "cpu", "dtype": "bfloat16"}
    config = RunConfig(model=str(folder), trainer=trainer)
    facts = find(str(folder))
    spec = AdapterSpec.build(facts.shape, config.adapter, servable=False)
    classes = TrainerMemory(facts, spec, facts.in_trainer("bf16")).classes(config)
    planned = [c.memory for c in classes for _ in range(c.ranks)]
    for memory, (base, held) in zip(planned, run_ranks(config, folder, packed_report), strict=True):
        assert (base, held["scratch"]) == (memory["base"], memory["scratch"])
        assert 0 < held["packed"] < base
