"""The frozen base costs nothing extra: no gradients, no optimizer state, no activations kept but
those that LoRA reads."""

from __future__ import annotations

import json

import pytest
from ranks import run_ranks

from lora_moe_rl.bench import memory
from lora_moe_rl.bench.model import save_random
from lora_moe_rl.cli import main
from lora_moe_rl.config import RunConfig
from lora_moe_rl.tiny.shapes import EXTRA_CONFIG, build_model

RANK = 16


def look(worker, spec):
    """After one step: the benchmark's figures, and what LoRA alone must keep."""
    engine = worker.engine
    inputs, products = {}, 0

    def read(lora, args):
        nonlocal products
        x = args[0]
        inputs[x.untyped_storage().data_ptr()] = x.untyped_storage()  # held, as `Kept` holds
        products += x[..., 0].numel() * sum(site.rank for site in lora.sites) * x.element_size()

    handles = [lora.register_forward_pre_hook(read) for lora in engine.adapters.layers]
    memory.Kept(engine)
    for handle in handles:
        handle.remove()
    base = memory.base_parameters(engine)
    mine = engine.adapters.parameters()
    trained = {id(p) for group in engine.optimizer.adam.param_groups for p in group["params"]}
    figures = memory.measure(worker, spec)
    return {
        "figures": figures,
        "base": [
            name
            for chunk in engine.chunks
            for name, p in chunk.named_parameters()
            if id(p) not in trained
            and (p.requires_grad or p.grad is not None or hasattr(p, "main_grad"))
        ],
        "stacked": [m.requires_grad or m.grad is not None for m in base],
        "trained": trained == {id(p) for p in mine},
        "count": sum(p.numel() for p in mine),
        "states": len(mine),
        "inputs": sum(storage.nbytes() for storage in inputs.values()),
        "products": products,
        "scaled_B": sum(p.nbytes for lora in engine.adapters.layers for p in lora.B),
    }


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_the_frozen_base_costs_nothing(name, tmp_path):
    save_random(tmp_path, lambda: build_model(name), EXTRA_CONFIG[name])
    tokens = memory.SEQUENCES * memory.TOKENS
    config = RunConfig(
        model=str(tmp_path), trainer={"micro_batch_tokens": tokens}, adapter={"rank": RANK}
    )
    (seen,) = run_ranks(config, tmp_path, look)
    figures = seen["figures"]
    adapters, base, everything = (figures[what] for what in ("adapters", "base", "all"))
    assert seen["base"] == [] and not any(seen["stacked"]), "the base has gradients"
    assert seen["trained"], "the optimizer holds other parameters than the adapters'"
    assert adapters["trained"] == adapters["gradients"] == 4 * seen["count"]
    # Two moments a number, and Adam's count of steps, one float a tensor.
    assert adapters["optimizer"] == 8 * seen["count"] + 4 * seen["states"]
    assert adapters["parameters"] == base["parameters"] + adapters["trained"]
    assert everything["gradients"] == everything["trained"] == base["parameters"]

    # x of each adapted linear once, A x, and B as it is multiplied: scaled, in x's dtype.
    lora = seen["inputs"] + seen["products"] + seen["scaled_B"]
    assert base["kept"] < adapters["kept"] <= base["kept"] + lora
    assert adapters["kept"] < everything["kept"]


def test_bench_memory_prints_the_figures(capsys):
    assert main(["bench", "memory", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)  # nothing else is printed there
    assert result.keys() == {"qwen3_moe", "deepseek_v3"}
    for columns in result.values():
        assert columns.keys() == {"adapters", "base", "all"}
        assert all(tuple(values) == memory.ROWS for values in columns.values())
        assert columns["adapters"]["kept"] < columns["all"]["kept"]
