"""vLLM's own model with experts for Marlin's kernels, loaded by our load format: on a GPU, or on
the CPU as on one, but that the repacking is vLLM's reference in torch, and that shared memory is a
mapped file. Nothing is computed with it: Marlin's kernels are CUDA's."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

DTYPE = "bfloat16"


def load(
    folder: str, model: str, form: str, rank: int, tp: int, port: int, answers, end, gpu: bool
) -> None:
    """A worker of an engine, in a process of its own: puts what it found into `answers`."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            answers.put((rank, _load(patch, folder, model, form, rank, tp, port, gpu)))
            end.wait(300)
    except BaseException as error:
        answers.put((rank, f"{type(error).__name__}: {error}"))
        raise


def _load(patch, folder: str, model: str, form: str, rank: int, tp: int, port: int, gpu: bool):
    """Of each layer that vLLM is about to process, (its number, bytes of experts by layer)."""
    from marlin import engine_rank, repacking_on_the_cpu
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs

    from lora_moe_rl.base import laid_out, loader

    loader.install()
    if gpu:
        torch.cuda.set_device(rank)
    else:
        patch.setenv("VLLM_DIST_IDENT", str(port))  # as vLLM sets it where it starts its workers
        _as_on_a_gpu(patch, form, loader, Path(folder) / f"memory-{rank}", rank)
    backend = {"moe_backend": "marlin"} if gpu and form == "int4" else {}
    config = EngineArgs(
        model=model, dtype=DTYPE, skip_tokenizer_init=True, max_model_len=128, enforce_eager=True,
        tensor_parallel_size=tp, enable_expert_parallel=tp > 1, enable_lora=True, max_lora_rank=8,
        **backend, **loader.engine_args(folder),
    ).create_engine_config()  # fmt: skip
    seen, process = [], laid_out.LaidOut._process

    def counting(self, layer, number):
        seen.append((number, memory_of(self.layers)))
        process(self, layer, number)

    patch.setattr(laid_out.LaidOut, "_process", counting)
    with set_current_vllm_config(config), contextlib.ExitStack() as stack:
        if not gpu:
            stack.enter_context(repacking_on_the_cpu())
        address = f"tcp://127.0.0.1:{port}"
        init_distributed_environment(tp, rank, address, rank, "nccl" if gpu else "gloo")
        initialize_model_parallel(tp)
        held_loader = loader.HeldLoader(config.load_config)
        made = held_loader.load_model(config, config.model_config)
    store, held = held_loader.store, loader.held_by(folder, config)
    expected = engine_rank(held, rank)
    for one in held.stacks():
        path, _, last = one.name.rpartition(".")
        out = torch.empty(store[one.name].shape, dtype=store[one.name].dtype)
        expected(one.name, out)
        assert torch.equal(store[one.name].cpu(), out), one.name
        assert getattr(made.get_submodule(path), last).data_ptr() == store[one.name].data_ptr()
    assert not any(one.is_meta for one in made.parameters())
    return seen


def memory_of(layers) -> list[int]:
    """Bytes of experts that each layer has, in whatever memory."""
    return [
        sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in ps}.values())
        for ps in (list(one.parameters()) for one in {id(o): o for o in layers.values()}.values())
    ]


def _as_on_a_gpu(patch, form: str, loader, memory: Path, rank: int) -> None:
    from dataclasses import replace

    from mapped_files import Files
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
    from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import (
        WNA16MoEBackend,
        make_wna16_moe_kernel,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_wna16 as wna16,
    )

    memory.mkdir()
    files = Files(memory, f"GPU-{rank}")
    real = loader.held_by
    patch.setattr(loader, "held_by", lambda *args: replace(real(*args), gpu=True))
    patch.setattr(loader, "Cuda", lambda: files)
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(torch.cuda, "set_device", lambda index: None)
    if form == "int4":
        choice = WNA16MoEBackend.MARLIN, MarlinExperts
        patch.setattr(wna16, "select_wna16_moe_backend", lambda *args, **kwargs: choice)
        patch.setattr(wna16, "make_wna16_moe_kernel", make_wna16_moe_kernel)
