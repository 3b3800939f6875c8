"""Dense linears of a quantised base, trained on as the checkpoint has them.

Megatron-Bridge has loaded them as numbers; each gives way to what is packed, once it is seen to be
the same in every bit. Of these numbers one linear's are there while it is multiplied, in a buffer
that linears of its shape share (`kernels/packed_linear.py`).

They stay numbers where rows are not the checkpoint's (q, k and v of GQA, which Megatron permutes),
where a bias is added, where a rank's part is not whole blocks, and in Transformer Engine's layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from megatron.core import parallel_state as ps
from megatron.core import tensor_parallel as mtp

from lora_moe_rl.adapters.families import ModelShape, hf_path
from lora_moe_rl.adapters.sharding import FUSED
from lora_moe_rl.errors import ModelError
from lora_moe_rl.files.untrusted import SafeWeights, read_json
from lora_moe_rl.kernels.dequant import Packed, dequantise
from lora_moe_rl.kernels.dequant.formats import MULTIPLES
from lora_moe_rl.kernels.packed_linear import packed_linear
from lora_moe_rl.models.quantised_names import form_of
from lora_moe_rl.models.quantised_weights import read_linear
from lora_moe_rl.trainer.local_modules import ReplicatedLinear
from lora_moe_rl.trainer.packed_experts import part_of

PERMUTED = "linear_qkv"


class PackedLinear(torch.nn.Module):
    """A linear without parameters. `gathers`: whether it reads all tokens of a tensor-parallel
    group, of which a rank has a slice; `sums`: whether its output is summed over the group."""

    def __init__(self, packed: Packed, gathers: bool, sums: bool):
        super().__init__()
        self.packed, self.gathers, self.sums = packed, gathers, sums
        self.device = packed.data.device
        _, self.out_features, self.in_features = packed.shape

    def forward(self, x: torch.Tensor):
        """x `[T, 1, in]`; returns (`[T, 1, out]`, no bias)."""
        if self.gathers:
            x = mtp.gather_from_sequence_parallel_region(x)
        y = packed_linear(x.flatten(0, -2), self.packed, [x.shape[:-1].numel()])
        y = y.view(*x.shape[:-1], self.out_features)
        return mtp.reduce_scatter_to_sequence_parallel_region(y) if self.sums else y, None


def pack(chunks: Sequence[torch.nn.Module], model_dir: Path) -> None:
    """Replaces this rank's. Raises ModelError for a linear that Megatron-Bridge loaded otherwise
    than it is packed, and for scales that are no scales."""
    shape = ModelShape.from_hf_config(read_json(model_dir / "config.json"))
    with SafeWeights.open(model_dir) as weights:
        for layer, path, linear in _linears(chunks):
            number = layer.layer_number - 1
            modules = [m for m in FUSED[path] if m in shape.modules(number)]
            paths = [f"model.layers.{number}.{hf_path(shape, module)}" for module in modules]
            if packed := _packed(weights, paths, linear):
                _check(paths[0], packed, linear.weight)
                parent, _, name = path.rpartition(".")
                setattr(layer.get_submodule(parent), name, _replacing(linear, packed))


def _linears(
    chunks: Sequence[torch.nn.Module],
) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Module]]:
    """(layer, path in it, linear) of those that may be packed."""
    kinds = (mtp.ColumnParallelLinear, mtp.RowParallelLinear, ReplicatedLinear)
    for chunk in chunks:
        for layer in getattr(chunk, "module", chunk).decoder.layers:
            found = dict(layer.named_modules())
            for path in FUSED:
                linear = found.get(path)
                plain = isinstance(linear, kinds) and getattr(linear, "bias", None) is None
                if plain and not path.endswith(PERMUTED):
                    yield layer, path, linear


def _packed(weights: SafeWeights, paths: list[str], linear: torch.nn.Module) -> Packed | None:
    """This rank's part `[1, out, in]` of the modules at `paths`, whose rows follow each other; None
    where it stays as it is."""
    forms = {form_of(path, weights.file_of) for path in paths}
    form = forms.pop()
    if forms or form is None:
        return None
    side = 1 if isinstance(linear, mtp.RowParallelLinear) else 0
    ways = 1 if isinstance(linear, ReplicatedLinear) else ps.get_tensor_model_parallel_world_size()
    parts = [read_linear(weights, path, form) for path in paths]
    whole, several = MULTIPLES[form][side], len(parts) > 1
    if any(part.shape[side] % (ways * whole) for part in parts if ways > 1 or several):
        return None
    mine = [part_of(part, side, ps.get_tensor_model_parallel_rank() % ways, ways) for part in parts]
    data, scales = (torch.cat([getattr(one, kind) for one in mine]) for kind in ("data", "scales"))
    device = linear.weight.device
    return Packed(form, data[None].to(device), scales[None].to(device))


def _replacing(linear: torch.nn.Module, packed: Packed) -> PackedLinear:
    cut_by_tp = ps.get_tensor_model_parallel_world_size() > 1
    column = isinstance(linear, mtp.ColumnParallelLinear)
    row = isinstance(linear, mtp.RowParallelLinear)
    return PackedLinear(packed, gathers=column and cut_by_tp, sums=row and cut_by_tp)


def _check(path: str, packed: Packed, weight: torch.Tensor) -> None:
    if packed.shape[1:] != weight.shape or not torch.equal(
        dequantise(packed, weight.dtype)[0], weight
    ):
        raise ModelError(
            f"{path}: Megatron-Bridge has loaded another {tuple(weight.shape)} than the checkpoint "
            f"has packed, {packed.shape[1:]}"
        )
