"""What of a base trainer ranks and engines hold beside the file that they share; an engine of its
own base that multiplies as those do that hold it once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from lora_moe_rl.adapters.sharding import window
from lora_moe_rl.base.dense import EMBEDDING
from lora_moe_rl.refit.merged_base import Base
from lora_moe_rl.refit.receiver import Receiver
from lora_moe_rl.rollout.engine import RolloutEngine

ROWS = 32  # of what kernels are tried on


class CountingReceiver(Receiver):
    """A vLLM worker that tells."""

    def own_base(self, path: str) -> int:
        return outside(self.model_runner.model.parameters(), Path(path))

    def multiply_as_held(self) -> dict[str, list[float]]:
        """From here on linears are multiplied by torch, each by a copy of this worker's own, and
        not by vLLM's packed kernels. `{kind: error of the packed kernel, of torch's}`: the root of
        the summed squares over all layers, relative, of products of random numbers against
        float64."""
        from vllm.distributed import get_tensor_model_parallel_rank

        from lora_moe_rl.base.loader import held_by, multiply_as_it_is
        from lora_moe_rl.base.parts import engine_part

        held, rank = held_by("", self.vllm_config), get_tensor_model_parallel_rank()
        base = Base(held.model_dir)
        fill, contents = held.filler(base), held.contents(base).tensors
        found: dict[str, list[float]] = {}
        for name, one in held.dense(base).items():
            layer = self.model_runner.model.get_submodule(name.removesuffix(".weight"))
            layer = getattr(layer, "base_layer", layer)  # which adapters may be around
            whole = torch.empty(one.shape, dtype=getattr(torch, contents[name].dtype))
            fill(name, whole)
            part = engine_part(one, held.tp, False, rank)
            weight = whole[window(part.start, part.shape)].clone()
            packed = layer.cpu_linear
            multiply_as_it_is(layer)
            if name != EMBEDDING:
                kind = found.setdefault(name.split(".")[-2], [0.0, 0.0])
                for i, kernel in enumerate((packed, layer.cpu_linear)):
                    kind[i] += _squared_error(kernel, layer.weight, weight)
            layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        base.weights.close()
        return {kind: [both[0] ** 0.5, both[1] ** 0.5] for kind, both in found.items()}


class CountingEngine(RolloutEngine):
    def _engine_args(self, cpu: bool) -> dict[str, Any]:
        worker = f"{CountingReceiver.__module__}.{CountingReceiver.__name__}"
        return super()._engine_args(cpu) | {"worker_extension_cls": worker}

    async def own_base(self, path: str) -> int:
        """Bytes of the base that this engine's workers hold beside the file."""
        return sum(await self.llm.collective_rpc("own_base", args=(path,)))

    async def multiply_as_held(self) -> dict[str, list[float]]:
        """As its workers; the errors of the first."""
        return (await self.llm.collective_rpc("multiply_as_held"))[0]


def _squared_error(kernel: Callable, packed: torch.Tensor, weight: torch.Tensor) -> float:
    """The squared error of a kernel that multiplies by `weight`, which it may have packed
    instead."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, weight.shape[1], generator=generator).to(weight.dtype)
    whole = weight if packed.numel() == 0 else packed
    exact = torch.nn.functional.linear(x.double(), weight.double())
    return float((kernel(x, whole, None) - exact).square().sum() / exact.square().sum())


def outside(tensors: Iterable[torch.Tensor], path: Path) -> int:
    """Bytes of tensors that do not lie in a mapping of the file, in this process."""
    found = re.findall(rf"^([0-9a-f]+)-([0-9a-f]+) .* {re.escape(str(path))}$", _maps(), re.M)
    ranges = [(int(first, 16), int(end, 16)) for first, end in found]
    storages = {
        (storage := tensor.untyped_storage()).data_ptr(): storage.nbytes() for tensor in tensors
    }
    return sum(
        nbytes
        for place, nbytes in storages.items()
        if not any(first <= place < end for first, end in ranges)
    )


def _maps() -> str:
    return Path("/proc/self/maps").read_text()
