"""`lora-moe-rl bench planned`: the plan's memory against what ranks and engines on the CPU hold."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lora_moe_rl.bench import report
from lora_moe_rl.bench.model import save_with_experts
from lora_moe_rl.bench.report import Result, cores, goal, temporary
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.options import positive, result_parser
from lora_moe_rl.planner.compute import Lengths
from lora_moe_rl.planner.facts import Facts, find
from lora_moe_rl.planner.held import shared_bytes
from lora_moe_rl.planner.host import samples_bytes
from lora_moe_rl.planner.plan import build_spec
from lora_moe_rl.planner.rollout import kv_token_bytes, slot_bytes, weight_bytes
from lora_moe_rl.planner.trainer import TrainerMemory
from lora_moe_rl.tiny.shapes import SHAPES
from lora_moe_rl.verify.report import table

ABOUT = """\
Real trainer ranks and engines on the CPU, in float32, of a model with random weights. Of each, the
anonymous memory that a process has over the bare one, with its imports done, by what it is for:
measured, and beside it what the plan says of the same layout. With `held once` the routed experts
lie in a file, of which the share that the rank is charged is measured. What a step adds is planned
for the modules of the CPU, which keep more than the fused ones of GPUs. Of the run's own process it
is what the samples of a step add.
"""
WIDTHS = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
}
MLA_WIDTHS = {key: WIDTHS[key] for key in list(WIDTHS)[:4]} | {"num_key_value_heads": 8}
TRAINERS: dict[str, dict[str, Any]] = {
    "trainer": {},
    "trainer, ep 2": {"world_size": 2, "ep": 2},
    "trainer, offload both": {"offload": "both"},
    "trainer, held once": {},
}
ENGINES: dict[str, dict[str, Any]] = {
    "engine": {},
    "engine, dp 2 ep": {"dp": 2, "ep": True},
}
# Of the run's own process: prompts of a step, samples of each, tokens of a prompt and a response.
SAMPLES: dict[str, tuple[int, int, int, int]] = {
    "the run, long samples": (32, 8, 512, 4096),
    "the run, short samples": (512, 8, 64, 256),
}
HELD = "trainer, held once"
STEP = "a step, at most"
RANK, TOKENS, CACHE_GIB = 32, 2048, 0.25
SAMPLE = 256  # tokens of a sample
OFF = 0.10
TIMEOUT_S = 600


@dataclass(frozen=True)
class Row:
    """Bytes of one kind on one rank."""

    place: str
    rank: int
    what: str
    planned: int
    measured: int

    @property
    def ratio(self) -> float:
        return self.measured / self.planned


def main(argv: Sequence[str]) -> int:
    parser = result_parser("bench planned", ABOUT)
    parser.add_argument("--model", choices=SHAPES, default="qwen3_moe", help="(qwen3_moe)")
    parser.add_argument("--experts", type=positive, default=32, help="of each layer (32)")
    places = [*TRAINERS, *ENGINES, *SAMPLES]
    parser.add_argument("--only", choices=places, action="append", help="of the places measured")
    parser.add_argument("--dir", default="/dev/shm", help="where a base held once lies (/dev/shm)")
    options = parser.parse_args(argv)
    os.environ["MKL_DISABLE_FAST_MM"] = "1"  # else MKL keeps 13 MiB of its products in each rank
    with temporary() as folder:
        save_model(Path(folder), options.model, options.experts)
        chosen = options.only or places
        rows = [row for place in chosen for row in measure(place, Path(folder), options.dir)]
    goals = {
        "measured over planned of what stays": [row for row in rows if row.what != STEP],
        "measured over planned of a step": [row for row in rows if row.what == STEP],
    }
    result = {
        "model": options.model,
        "experts": options.experts,
        "rows": [asdict(row) | {"ratio": row.ratio} for row in rows],
        "cores": cores(),
        "goals": {
            f"{what}, farthest from 1": goal(max(abs(row.ratio - 1) for row in some), OFF)
            for what, some in goals.items()
            if some
        },
    }
    report.conclude(result, options.json, parts)
    return 0 if report.all_met(result) else 1


def save_model(folder: Path, name: str, experts: int) -> None:
    widths = WIDTHS if "head_dim" in SHAPES[name] else MLA_WIDTHS
    save_with_experts(folder, name, experts, widths)


def config_of(folder: Path, **sections: dict[str, Any]) -> RunConfig:
    trainer = {"dtype": "float32", "device": "cpu", "micro_batch_tokens": TOKENS}
    rollout = {"cpu_kv_cache_gib": CACHE_GIB}
    return RunConfig.model_validate(
        {
            "model": {"path": str(folder), "max_length": SAMPLE + 1},
            "adapter": {"rank": RANK, "alpha": RANK},
            "trainer": trainer | {"share_prompts": "off"} | sections.get("trainer", {}),
            "rollout": rollout | sections.get("rollout", {}),
        }
    )


def measure(place: str, folder: Path, directory: str) -> list[Row]:
    if place in SAMPLES:
        return of_samples(place, folder)
    facts = find(str(folder))
    if place in ENGINES:
        return of_engine(place, facts, config_of(folder, rollout=ENGINES[place]))
    config = config_of(folder, trainer=TRAINERS[place])
    if place != HELD:
        return of_trainer(place, facts, config, None)
    from lora_moe_rl.base.owner import owned

    with owned(directory) as held:
        return of_trainer(place, facts, config, held)


def of_trainer(place: str, facts: Facts, config: RunConfig, held: str | None) -> list[Row]:
    from lora_moe_rl.bench.planned_jobs import train
    from lora_moe_rl.verify.processes import run_processes
    from lora_moe_rl.verify.ranks import free_address

    model = Path(config.model.path)
    arguments = (free_address(), config, model, held)
    found = run_processes(config.trainer.world_size, train, *arguments, timeout_s=TIMEOUT_S)
    planned = plan_of_trainer(facts, config, held is not None)
    return [
        Row(place, rank, what, planned[what], nbytes)
        for rank, one in enumerate(found)
        for what, nbytes in one.items()
    ]


def plan_of_trainer(facts: Facts, config: RunConfig, held: bool) -> dict[str, int]:
    """The planned bytes by what is measured. What is offloaded is in the host's memory, which on
    the CPU is the rank's own. The base's file is a part of the base."""
    (rank,) = TrainerMemory(facts, build_spec(facts, config), "float32").classes(config)
    shared = shared_bytes(facts, config, 0, "float32", 1) if held else 0
    memory = rank.memory
    moving = ("activations", "one layer's work", "communication", "logits", "Adam's step")
    kept = ("adapter", "gradients", "optimizer")
    found = {
        "base": memory["base"],
        "adapter, gradients, moments": sum(memory[kind] for kind in kept) + rank.host,
        STEP: sum(memory[kind] for kind in moving) + rank.host_in_step,
    }
    return found | ({"base, of the file": shared} if held else {})


def of_engine(place: str, facts: Facts, config: RunConfig) -> list[Row]:
    from lora_moe_rl.bench.planned_jobs import HeldEngine
    from lora_moe_rl.verify.engine import EngineProcess

    model, spec, rollout = Path(config.model.path), build_spec(facts, config), config.rollout
    with EngineProcess(config, spec, model, model / "engine.log", HeldEngine) as engine:
        engine.start()
        found = engine.ask("bytes_held")
    planned = {
        "weights": weight_bytes(facts, rollout.tp, rollout.ep, "float32", rollout.dp),
        "adapter slots": slot_bytes(spec, config, 4),
    }
    token = kv_token_bytes(facts, rollout.tp, 4)
    rows = []
    for rank, one in enumerate(found):
        tokens = one.pop("tokens")
        by_kind = planned | {"KV cache": token * tokens}
        rows += [Row(place, rank, what, by_kind[what], nbytes) for what, nbytes in one.items()]
    return rows


def of_samples(place: str, folder: Path) -> list[Row]:
    from lora_moe_rl.bench.planned_jobs import hold_samples
    from lora_moe_rl.verify.processes import apart

    prompts, group_size, prompt, response = SAMPLES[place]
    algorithm = {"prompts_per_step": prompts, "group_size": group_size}
    config = config_of(folder).model_copy(
        update={"algorithm": RunConfig(algorithm=algorithm).algorithm}
    )
    lengths = Lengths(prompt, response)
    held = apart("samples", hold_samples, config, lengths, timeout_s=TIMEOUT_S)
    return [Row(place, 0, "samples of a step", samples_bytes(config, lengths), held)]


def parts(result: Result) -> Iterable[Any]:
    yield (
        f"{result['model']}, {result['experts']} experts a layer, float32, {result['cores']} "
        f"cores; MiB"
    )
    shown = table(["", "rank", "", "planned", "measured", "ratio"])
    for row in result["rows"]:
        sizes = (f"{row[key] / 2**20:,.1f}" for key in ("planned", "measured"))
        shown.add_row(row["place"], str(row["rank"]), row["what"], *sizes, f"{row['ratio']:.3f}")
    yield shown
