"""A process's job: vLLM's own model without an engine, after merged refits and after a load of a
checkpoint merged by hand. Prints what differs, as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import tiny_families
import torch
from refit_ranks import make_layouts, make_senders
from test_merged_refit import Serving, merge_by_hand
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.model_loader import get_model

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import AdapterConfig, TrainerConfig
from lora_moe_rl.refit.merged import MergedReceiver
from lora_moe_rl.refit.merged_modules import base_linear
from lora_moe_rl.refit.parts import to_json
from lora_moe_rl.refit.plan import EngineLayout
from lora_moe_rl.refit.transports.shm import SHARED_MEMORY

TRAINER = TrainerConfig(world_size=2, tp=2)


def load(folder: Path, store: Path):
    config = EngineArgs(
        model=str(folder), dtype="float32", enforce_eager=True, skip_tokenizer_init=True,
        max_model_len=128,
    ).create_engine_config()  # fmt: skip
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            parallel_state.init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
            parallel_state.ensure_model_parallel_initialized(1, 1)
        return config, get_model(vllm_config=config)


class Worker(MergedReceiver):
    rank = 0

    def __init__(self, config, model):
        self.model_runner = SimpleNamespace(
            get_model=lambda: model, model_config=config.model_config, vllm_config=config,
            lora_config=None, device=torch.device("cpu"),
        )  # fmt: skip


@torch.no_grad()
def unlike(ours: torch.nn.Module, theirs: torch.nn.Module) -> list[str]:
    """Tensors that are not equal to the bit, and linears whose outputs are not: the CPU keeps their
    weights packed, where they cannot be read."""
    tensors = [dict(m.named_parameters()) | dict(m.named_buffers()) for m in (ours, theirs)]
    assert tensors[0].keys() == tensors[1].keys()
    found = [name for name, t in tensors[0].items() if not torch.equal(t, tensors[1][name])]
    modules = dict(theirs.named_modules())
    for name, module in ours.named_modules():
        if isinstance(module, LinearBase):
            width = getattr(module, "input_size_per_partition", module.input_size)
            x = torch.randn(7, width, generator=torch.Generator().manual_seed(0))
            outputs = [m.quant_method.apply(m, x) for m in (module, modules[name])]
            if not torch.equal(*outputs):
                found.append(f"{name}()")
    return found


def check(name: str, folder: Path) -> dict[str, list[str]]:
    base = folder / "base"
    tiny_families.save(name, base)
    shape = ModelShape.from_hf_config(json.loads((base / "config.json").read_text()))
    mla = shape.family.attention == "mla"
    adapter = AdapterConfig(rank=6, expert_rank=4, targets=("*", "kv_b_proj") if mla else ("*",))
    spec = AdapterSpec.build(shape, adapter, servable=False)
    serving = Serving(None, None, spec, folder)
    config, model = load(base, folder.parent / "store")
    worker = Worker(config, model)
    layouts = make_layouts(spec, TRAINER, EngineLayout(8, merged=True))
    answers = [worker.refit_prepare(to_json(layouts), SHARED_MEMORY.to_json(), "stochastic", 0)]
    for version in (1, 2):
        tensors = serving.adapter(version)
        senders = make_senders(layouts, spec, tensors, TRAINER)
        sent = json.dumps([asdict(sender.send(version)) for sender in senders])
        answers += [worker.refit_stage(version, sent), worker.refit_commit(version)]
    answers.append(worker.refit_compare(2, sent))
    errors = [answer["error"] for answer in answers if "error" in answer]
    _, restarted = load(merge_by_hand(serving, tensors), folder.parent / "store")
    _, fresh = load(base, folder.parent / "store")
    found = {
        "errors": errors,
        "unlike_restart": unlike(model, restarted),
        "unlike_base": unlike(model, fresh),
        "unlike_sent": answers[-1].get("differing", []),
    }
    linears = [module for module in worker._refit_modules if not module.is_experts]
    for module in linears:
        worker._refit_weights.load_linear(module.path, base_linear(worker._refit_base, module))
    unlike_sent = worker.refit_compare(2, sent)["differing"]
    return found | {"unnoticed": sorted({module.path for module in linears} ^ {*unlike_sent})}


if __name__ == "__main__":
    root = Path(sys.argv[1])
    torch.set_num_threads(1)
    found = {name: check(name, root / name) for name in sys.argv[2:]}
    (root / "found.json").write_text(json.dumps(found))
