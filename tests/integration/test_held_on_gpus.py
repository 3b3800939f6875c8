"""The base once on each of two GPUs, which are names: the real vLLM, TP 2 with EP, and real
Megatron ranks, through the code that runs on GPUs; the memory is that of mapped files."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path

import pytest
from held_bases import assert_close, scores_of
from quantised import make_pair
from ranks import FileJob, random_batch, spec_of
from stand_in_gpus import SharingEngine

from lora_moe_rl.base.owner import owned
from lora_moe_rl.bench.model import save_random
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import ActorFailed
from lora_moe_rl.rollout.engine import RolloutEngine
from lora_moe_rl.tiny.shapes import EXTRA_CONFIG, build_model
from lora_moe_rl.tiny.tokenizer import make_tokenizer
from lora_moe_rl.verify.engine import EngineProcess
from lora_moe_rl.verify.processes import Processes, quickest
from lora_moe_rl.verify.ranks import free_address

pytestmark = pytest.mark.slow
LOGPROBS, GRADIENTS = 5e-6, 1e-5
TIMEOUT_S = 400
SMALL = {"router", "input_layernorm", "pre_mlp_layernorm", "final_layernorm"}
MLA = {"linear_q_up_proj", "linear_kv_up_proj", "linear_proj", "word_embeddings", "output_layer"}
MLP = {"linear_fc1", "linear_fc2"}  # of dense MLPs and shared experts
# Of each family a layout of the trainer, and what of it a rank has for itself.
LAYOUTS = {
    "qwen3_moe": ({"tp": 2, "ep": 2}, SMALL | {"q_layernorm", "k_layernorm"}),
    # Experts as vLLM lays them out for Marlin's kernels, whose sizes these are.
    "qwen3_moe-int4": ({"tp": 2, "ep": 2}, SMALL | {"q_layernorm", "k_layernorm"}),
    "deepseek_v3": ({"ep": 2}, SMALL | MLA | {"q_layernorm", "kv_layernorm", *MLP}),
}


@pytest.fixture(params=LAYOUTS)
def model(request, tmp_path) -> Path:
    folder = tmp_path / request.param
    if request.param.endswith("-int4"):
        sizes = {"hidden_size": 128, "moe_intermediate_size": 64}
        packed, _ = make_pair("qwen3_moe", tmp_path / "pair", "int4", **sizes)
        return packed.rename(folder)
    folder.mkdir()
    save_random(folder, lambda: build_model(request.param), EXTRA_CONFIG[request.param])
    make_tokenizer().save_pretrained(folder)
    return folder


def config_of(model: Path) -> RunConfig:
    trainer, _ = LAYOUTS[model.name]
    trainer = {"dtype": "float32", "device": "cpu", "micro_batch_tokens": 40} | trainer
    return RunConfig(
        model={"path": str(model), "max_length": 128},
        adapter={"rank": 4, "alpha": 8},
        trainer={"world_size": 2, **trainer},
        rollout={"cpu_kv_cache_gib": 0.06, "tp": 2, "ep": True},
    )


def ranks_of(model: Path, config: RunConfig, held: str | None, gpus: list[int]) -> Processes:
    names = [f"rank {rank}" for rank in range(2)]
    make = FileJob(str(Path(__file__).with_name("stand_in_gpus.py")), "SharingRank")
    parts = free_address(), config, model, held, gpus
    return Processes(names, make, *parts, start=quickest(), as_raised=False)


def test_two_gpus_hold_their_base_once_and_compute_what_copies_do(model, tmp_path):
    config = config_of(model)
    spec, (_, of_its_own) = spec_of(model, config), LAYOUTS[model.name]
    sequences = [row.tolist() for row in random_batch(spec)[0].token_ids]
    parts = config, spec, model
    with EngineProcess(*parts, tmp_path / "own.log", RolloutEngine) as engine:
        own_scores = scores_of(engine, sequences)
    with ranks_of(model, config, None, [0, 1]) as ranks:
        private = ranks.call("compute", timeout_s=TIMEOUT_S)
    with owned("/dev/shm") as folder, contextlib.ExitStack() as alive:
        made = functools.partial(SharingEngine, held=folder)
        engine = alive.enter_context(EngineProcess(*parts, tmp_path / "held.log", made))
        assert_close(scores_of(engine, sequences), own_scores, LOGPROBS)
        with (
            pytest.raises(ActorFailed, match=r"this rank takes .*, and GPU GPU-\d, .* has "),
            ranks_of(model, config, folder, [1, 0]) as ranks,
        ):
            ranks.call("check", timeout_s=TIMEOUT_S)
        with ranks_of(model, config, folder, [0, 1]) as ranks:
            shared = ranks.call("compute", timeout_s=TIMEOUT_S)
            for (scores, gradients), (own, of_own) in zip(shared, private, strict=True):
                assert (scores is None) == (own is None)
                assert_close(scores or [], own or [], LOGPROBS)
                assert_close(gradients, of_own, GRADIENTS, relative=True)
            for own in ranks.call("own", timeout_s=TIMEOUT_S):
                assert own == of_its_own
            ranks.call("check", timeout_s=TIMEOUT_S)
            assert_close(engine.ask("score", sequences, None)[0], own_scores, LOGPROBS)
            alive.close()
            message = "the engine that holds the base has ended"
            with pytest.raises(ActorFailed, match=message):
                ranks.call("check", timeout_s=TIMEOUT_S)
