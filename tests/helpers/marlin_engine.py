"""vLLM's own model with experts for Marlin's kernels, loaded by our load format on the CPU: as on a
GPU, but that the repacking is vLLM's reference in torch, and that shared memory is a mapped file.
Nothing is computed with it: Marlin's kernels are CUDA's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

DTYPE = "bfloat16"


def load(folder: str, model: str, form: str, rank: int, tp: int, port: int, answers, end) -> None:
    """A worker of an engine, in a process of its own: puts what it found into `answers`."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            answers.put((rank, _load(patch, folder, model, form, rank, tp, port)))
            end.wait(300)
    except BaseException as error:
        answers.put((rank, f"{type(error).__name__}: {error}"))
        raise


def _load(patch, folder: str, model: str, form: str, rank: int, tp: int, port: int) -> Any:
    from mapped_files import Files
    from marlin import engine_rank, repacking_on_the_cpu
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs

    from lora_moe_rl.base import laid_out, loader

    loader.install()
    patch.setenv("VLLM_DIST_IDENT", str(port))  # as vLLM sets it where it starts its workers
    memory = Path(folder) / f"memory-{rank}"
    memory.mkdir()
    _as_on_a_gpu(patch, form, loader, Files(memory, f"GPU-{rank}"))
    config = EngineArgs(
        model=model, dtype=DTYPE, skip_tokenizer_init=True, max_model_len=128, enforce_eager=True,
        tensor_parallel_size=tp, enable_expert_parallel=tp > 1, enable_lora=True, max_lora_rank=8,
        **loader.engine_args(folder),
    ).create_engine_config()  # fmt: skip
    seen, process = [], laid_out.LaidOut._process

    def counting(self, layer, number):
        seen.append((number, memory_of(self.layers)))
        process(self, layer, number)

    patch.setattr(laid_out.LaidOut, "_process", counting)
    with set_current_vllm_config(config), repacking_on_the_cpu():
        init_distributed_environment(tp, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
        initialize_model_parallel(tp)
        held = loader.HeldLoader(config.load_config)
        made = held.load_model(config, config.model_config)
    store = held.store
    expected = engine_rank(loader.held_by(folder, config), rank)
    for stack in loader.held_by(folder, config).stacks():
        out = torch.empty_like(store[stack.name])
        expected(stack.name, out)
        layer, last = made.get_submodule(stack.name.rpartition(".")[0]), stack.name.split(".")[-1]
        assert torch.equal(store[stack.name], out), stack.name
        assert getattr(layer, last).data_ptr() == store[stack.name].data_ptr(), stack.name
    assert not any(one.is_meta for one in made.parameters())
    return seen


def memory_of(layers) -> list[int]:
    """Bytes of experts that each layer has, in whatever memory."""
    return [
        sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in ps}.values())
        for ps in (list(one.parameters()) for one in {id(o): o for o in layers.values()}.values())
    ]


def _as_on_a_gpu(patch, form: str, loader, files) -> None:
    from dataclasses import replace

    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
    from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import (
        WNA16MoEBackend,
        make_wna16_moe_kernel,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_wna16 as wna16,
    )

    real = loader.held_by
    patch.setattr(loader, "held_by", lambda *args: replace(real(*args), gpu=True))
    patch.setattr(loader, "Cuda", lambda: files)
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(torch.cuda, "set_device", lambda index: None)
    if form == "int4":
        choice = WNA16MoEBackend.MARLIN, MarlinExperts
        patch.setattr(wna16, "select_wna16_moe_backend", lambda *args, **kwargs: choice)
        patch.setattr(wna16, "make_wna16_moe_kernel", make_wna16_moe_kernel)
