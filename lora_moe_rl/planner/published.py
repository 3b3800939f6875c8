"""The planner against what others published: sizes of models and adapters, memory of runs.

`lora-moe-rl plan --published`. Exit code 1 when a difference is beyond its bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import AdapterConfig, RunConfig
from lora_moe_rl.planner.activations import FUSED
from lora_moe_rl.planner.base import num_parameters, prediction_parameters
from lora_moe_rl.planner.facts import Facts, config_of, find, known
from lora_moe_rl.planner.hardware import GIB
from lora_moe_rl.planner.tables import WIDTH
from lora_moe_rl.planner.trainer import TrainerMemory
from lora_moe_rl.verify import report

# GLM-5.x's linears as a DeepSeek-V3: without the indexer of its sparse attention, which has none.
GLM_5 = config_of("deepseek_v3") | {
    "num_hidden_layers": 78, "hidden_size": 6144, "vocab_size": 154880,
    "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 2048,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 192, "v_head_dim": 256,
    "intermediate_size": 12288, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "first_k_dense_replace": 3, "n_group": 1, "topk_group": 1,
}  # fmt: skip
BF16 = 2


@dataclass(frozen=True)
class Row:
    """`bound`: the largest relative difference that passes."""

    what: str
    predicted: float
    published: float
    bound: float
    source: str
    note: str = ""

    @property
    def difference(self) -> float:
        return self.predicted / self.published - 1

    @property
    def passed(self) -> bool:
        return abs(self.difference) <= self.bound


def rows() -> list[Row]:
    return [*_models(), *_adapters(), *_memory()]


@dataclass
class Published(report.Report):
    rows: list[Row]
    width = WIDTH

    def explanations(self) -> list[str]:
        return []  # a row of the table says it all

    def parts(self) -> Iterator[Any]:
        table = report.table(["", "planned", "published", "difference", "bound", "source"])
        for row in self.rows:
            figures = [f"{value:,.{_digits(value)}f}" for value in (row.predicted, row.published)]
            verdict = "" if row.passed else "  FAIL"
            cells = [*figures, f"{row.difference:+.3%}", f"{row.bound:.1%}{verdict}", row.source]
            table.add_row(row.what, *cells)
        yield table
        yield from (f"{row.what}: {row.note}" for row in self.rows if row.note)

    def figures(self) -> list[dict[str, Any]]:
        return [
            asdict(row) | {"difference": row.difference, "passed": row.passed} for row in self.rows
        ]


def _models() -> Iterator[Row]:
    for stem, entry in known().items():
        facts = find(entry["name"])
        if facts.parameters is not None:
            predicted = num_parameters(facts) + prediction_parameters(facts)
            exact = stem not in ("kimi_k2", "kimi_k2_thinking", "moonlight_16b_a3b")
            bound = 0.0 if exact else 1e-3
            yield Row(f"{facts.name}, parameters", predicted, facts.parameters, bound, facts.stated)


def _adapters() -> Iterator[Row]:
    qwen = ModelShape.from_hf_config(config_of("qwen3_30b_a3b"))
    one = AdapterSpec.build(qwen, AdapterConfig(rank=1))
    tensors = sum(2 * (site.num_experts or 1) for site in one)
    yield Row("Qwen3-30B-A3B rank 1, tensors", tensors, 37248, 0.0, "MinT, arXiv:2605.13779")
    size = BF16 * one.num_parameters
    yield Row("Qwen3-30B-A3B rank 1, bytes", size, 105.58e6, 2e-3, "MinT, arXiv:2605.13779")
    size = BF16 * AdapterSpec.build(qwen, AdapterConfig(rank=16)).num_parameters
    yield Row("Qwen3-30B-A3B rank 16, bytes", size, 1.692e9, 5e-3, "MinT, arXiv:2605.13779")
    glm = ModelShape.from_hf_config(GLM_5)
    everything = AdapterConfig(rank=32, targets=("*", "kv_b_proj"))
    size = BF16 * AdapterSpec.build(glm, everything, servable=False).num_parameters
    note = "kv_b_proj included"
    yield Row("GLM-5.x rank 32, bytes", size, 30.77e9, 2e-3, "SkyRL issue 2195", note)


def _memory() -> Iterator[Row]:
    parts = verl_deepseek()
    yield Row(
        "verl, DeepSeek-V3 on 96 GPUs, GB",
        sum(parts.values()) / 1e9,
        66,
        0.15,
        "verl docs/perf/dpsk.md",
        _listed(parts),
    )
    parts = megatron_lite()
    other = sum(megatron_lite("full").values()) / GIB
    note = f"{_listed(parts)}; had layers been recomputed, which is not published: {other:.1f}"
    yield Row(
        "Megatron Lite, Qwen3-30B-A3B r128, GiB",
        sum(parts.values()) / GIB,
        33.447,
        0.15,
        "ISEEKYAN/Megatron-LM pull request 131",
        note,
    )


def _listed(parts: dict[str, int]) -> str:
    return ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items()) + " (GiB)"


def verl_deepseek() -> dict[str, int]:
    """Its heaviest rank: every parameter trained, TP8 PP12 EP8, 11 x 5 + 6 layers, 10,240 tokens a
    micro-batch, full recomputation, bf16 parameters, float32 gradients, the optimizer on the host.
    Its loss is fused with the head, so that no logits are kept."""
    facts = find("deepseek-v3")
    trainer = {"world_size": 96, "tp": 8, "pp": 12, "ep": 8, "micro_batch_tokens": 10240}
    config = _config(facts, trainer | {"recompute": "full"}, AdapterConfig(rank=1), 10240)
    heaviest = _heaviest(facts, config)
    parameters = heaviest.base_parameters
    return {"parameters": BF16 * parameters, "gradients": 4 * parameters} | _moving(heaviest)


def megatron_lite(recompute: str = "none") -> dict[str, int]:
    """PyTorch's peak on TP2 EP8 of 8 GPUs: rank 128, prompts of 1,024 and responses of 4,096 tokens
    in micro-batches of one sample, fused loss, adapters in bf16 and their gradients in float32,
    the optimizer on the host. Whether layers were recomputed is not published."""
    facts = find("qwen3-30b-a3b")
    trainer = {"world_size": 8, "tp": 2, "ep": 8, "micro_batch_tokens": 5120}
    config = _config(facts, trainer | {"recompute": recompute}, AdapterConfig(rank=128), 5120)
    heaviest = _heaviest(facts, config)
    trained = heaviest.trained_parameters
    base, moving = heaviest.base_bytes["bf16"], _moving(heaviest)
    moving.pop("runtime")  # not PyTorch's
    return {"base": base, "adapters": BF16 * trained, "gradients": 4 * trained} | moving


def _config(facts: Facts, trainer: dict, adapter: AdapterConfig, tokens: int) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": facts.name, "max_length": tokens},
            "rollout": {"max_response_tokens": tokens // 2},
            "trainer": trainer,
            "adapter": adapter.model_dump(exclude_unset=True),
            "algorithm": {"prompts_per_step": 32},
        }
    )


def _heaviest(facts: Facts, config: RunConfig):
    spec = AdapterSpec.build(facts.shape, config.adapter)
    classes = TrainerMemory(facts, spec, "bf16", FUSED).classes(config)
    return max(classes, key=lambda c: c.base_parameters)


def _moving(c) -> dict[str, int]:
    kinds = ("activations", "one layer's work", "communication", "allocator", "runtime")
    return {kind: c.memory[kind] for kind in kinds}


def _digits(value: float) -> int:
    return 0 if math.isclose(value, round(value), abs_tol=1e-9) or value > 1e6 else 2
