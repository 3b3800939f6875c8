"""Routed experts of a quantised base, trained on as the checkpoint has them, or as vLLM has laid
them out on the GPU where engines hold them too.

    checkpoint's packed tensors -> stacked, this rank's experts -> packed_linear (forward, backward)

The weights of a layer exist as numbers only while they are multiplied, in a buffer that all layers
share (`kernels/packed_linear.py`): at no time is there another copy of the model. They are loaded
here, beside Megatron-Bridge, which would hand them over dequantised; it loads everything else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from megatron.core import parallel_state as ps

from lora_moe_rl.adapters.families import ModelShape, hf_path
from lora_moe_rl.base.same import check_same
from lora_moe_rl.base.shared import Shared
from lora_moe_rl.errors import ModelError
from lora_moe_rl.files.untrusted import DTYPES, SafeWeights, read_json
from lora_moe_rl.kernels.dequant import Form, Packed, dequantise
from lora_moe_rl.kernels.dequant.formats import DATA_DTYPES, MARLIN, MULTIPLES, packed_shapes
from lora_moe_rl.kernels.packed_linear import SCRATCH, packed_linear
from lora_moe_rl.models.quantised_names import TENSORS, form_of
from lora_moe_rl.models.quantised_weights import read_linear, read_scales
from lora_moe_rl.trainer.local_modules import ExpertLinears, place_experts

SCALE_DTYPES = {"int4": ("BF16", "F16", "F32"), "fp8": ("F32",), "mxfp4": ("U8",)}
# Of each linear of an expert: what it holds, in the order of its rows, and which side is cut.
HOLDS = {"column": (("experts.gate", "experts.up"), 0), "row": (("experts.down",), 1)}
MEGATRON = {"column": "linear_fc1", "row": "linear_fc2"}


@dataclass(frozen=True)
class Stored:
    """How a checkpoint stores routed experts."""

    form: Form
    scale_dtype: torch.dtype


class PackedGroupedLinear(ExpertLinears):
    """Linears of this rank's experts, without parameters: `packed` holds the weights, and is theirs
    from `load` on; `later`: no memory is taken before."""

    def __init__(
        self, num_gemms, input_size, output_size, *, config, stored: Stored, later: bool, **kwargs
    ):
        super().__init__(num_gemms, input_size, output_size, config=config, **kwargs)
        on_cpu = config.use_cpu_initialization
        self.device = torch.device("cpu" if on_cpu else f"cuda:{torch.cuda.current_device()}")
        self.dtype = config.params_dtype
        self.held: tuple[str, ...] = ()  # what of `packed` engines hold too
        shape = (num_gemms, self.out_features, self.in_features)
        data, scales = packed_shapes(stored.form, shape)
        device = torch.device("meta") if later else self.device
        self.packed = Packed(
            stored.form,
            torch.empty(data, dtype=DATA_DTYPES[stored.form], device=device),
            torch.empty(scales, dtype=stored.scale_dtype, device=device),
        )

    def forward(self, x, m_splits):
        return packed_linear(x, self.packed, m_splits), None


class ColumnPackedLinear(PackedGroupedLinear):
    parallel_mode = "column"


class RowPackedLinear(PackedGroupedLinear):
    parallel_mode = "row"


def find(model_dir: Path) -> PackedExperts | None:
    """The packed experts of a checkpoint, None when they are not quantised. Raises ModelError for
    scales of another dtype than their form has."""
    config = read_json(model_dir / "config.json")
    if not config.get("quantization_config"):
        return None
    shape, weights = ModelShape.from_hf_config(config), SafeWeights.open(model_dir)
    for layer in shape.moe_layers[:1]:
        path = f"model.layers.{layer}.{hf_path(shape, 'experts.gate')}".format(0)
        if form := form_of(path, weights.file_of):
            scale = weights.entry(f"{path}.{TENSORS[form][1]}")
            if scale.dtype not in SCALE_DTYPES[form]:
                raise ModelError(
                    f"{scale.name} in {model_dir} is {scale.dtype}; scales of {form} weights are "
                    f"{' or '.join(SCALE_DTYPES[form])}"
                )
            dtype = getattr(torch, DTYPES[scale.dtype][1])
            return PackedExperts(weights, shape, Stored(form, dtype))
    return None


@dataclass
class PackedExperts:
    """The packed experts of a checkpoint, on their way into models."""

    weights: SafeWeights
    shape: ModelShape
    stored: Stored

    def place(self, provider, later: bool = False) -> None:
        """The models that Bridge's provider builds get packed experts; `later`: which take no
        memory before they are loaded. Raises ModelError for experts that cannot be cut as the
        provider's options say."""
        etp, whole = provider.expert_tensor_parallel_size, max(MULTIPLES[self.stored.form])
        if (width := self.shape.dims["moe_intermediate"]) % (etp * whole):
            raise ModelError(
                f"experts of the width {width}, {self.stored.form}, are not whole groups of "
                f"{whole} when trainer.etp={etp} cuts them; use a smaller trainer.etp, and "
                "trainer.ep for the rest"
            )
        kinds = ColumnPackedLinear, RowPackedLinear
        place_experts(provider, *(partial(k, stored=self.stored, later=later) for k in kinds))

    def load(self, chunks: Sequence[torch.nn.Module], shared: Shared | None = None) -> None:
        """Fills this rank's, but for what is `shared` with engines: of that what vLLM has laid out
        is compared with the checkpoint, every expert of it. Raises ModelError for tensors that are
        not those of the model, and for scales that are no scales; HeldBaseError for shared bytes
        that are not those that were written, or other weights than the checkpoint's."""
        first = ps.get_expert_model_parallel_rank()
        cut = ps.get_expert_tensor_parallel_rank(), ps.get_expert_tensor_parallel_world_size()
        for layer, modules, side, linear in _linears(chunks):
            if shared is not None:
                name = f"decoder.layers.{layer}.mlp.experts.{MEGATRON[linear.parallel_mode]}"
                _hold(linear, name, shared)
            laid_out = linear.packed.form in MARLIN.values()
            if linear.held == ("data", "scales") and not laid_out:
                continue
            rows = linear.out_features // len(modules)
            for local_expert in range(linear.num_gemms):
                expert = first * linear.num_gemms + local_expert
                paths = [f"model.layers.{layer}.{hf_path(self.shape, m)}" for m in modules]
                paths = [path.format(expert) for path in paths]
                if laid_out:
                    self._compare(linear, local_expert, paths, side, cut)
                    continue
                for part, path in enumerate(paths):
                    read = _read(self.weights, path, linear)
                    parts = {n: one.chunk(cut[1], dim=side)[cut[0]] for n, one in read.items()}
                    _put(linear, local_expert, part * rows, rows, parts, path)
        self.weights.close()

    def _compare(
        self,
        linear: PackedGroupedLinear,
        expert: int,
        paths: Sequence[str],
        side: int,
        cut: tuple[int, int],
    ) -> None:
        """What is multiplied of an expert, by the kernel that training takes, with what torch makes
        of the checkpoint, bit for bit."""
        held = dequantise(linear.packed.of(expert), linear.dtype).chunk(len(paths))
        for path, mine in zip(paths, held, strict=True):
            part = part_of(read_linear(self.weights, path, self.stored.form), side, *cut)
            part = Packed(part.form, part.data.to(linear.device), part.scales.to(linear.device))
            check_same(path, mine, dequantise(part, linear.dtype, "torch"))


def _linears(
    chunks: Sequence[torch.nn.Module],
) -> Iterator[tuple[int, tuple[str, ...], int, PackedGroupedLinear]]:
    """(global layer, canonical modules, the side that is cut, linear) of each packed linear."""
    for chunk in chunks:
        for layer in getattr(chunk, "module", chunk).decoder.layers:
            for linear in layer.mlp.modules():  # which adapters may be around
                if isinstance(linear, PackedGroupedLinear):
                    yield layer.layer_number - 1, *HOLDS[linear.parallel_mode], linear


def _hold(linear: PackedGroupedLinear, name: str, shared: Shared) -> None:
    """Points a linear at what engines hold too: packed values, and scales of groups, which are of
    the dtype that is computed in. Makes room for the scales that they do not."""
    form = shared.held.layout
    assert form is not None
    data, scales = (
        torch.empty(shape, dtype=dtype, device="meta")
        for shape, dtype in zip(
            packed_shapes(form, linear.packed.shape),
            (DATA_DTYPES[form], linear.packed.scales.dtype),
            strict=True,
        )
    )
    data = shared.part(name, data.flatten(2)).view(data.shape)
    linear.held = ("data",)
    if (name := f"{name}.scales") in shared.stacks:
        scales, linear.held = shared.part(name, scales), ("data", "scales")
    else:
        scales = torch.empty_like(scales, device=linear.device)
    linear.packed = Packed(form, data, scales)


def part_of(packed: Packed, side: int, rank: int, ways: int) -> Packed:
    """This rank's part of a linear `[out, in]`: rows (side 0) or columns, whole groups of them."""
    parts = (t.chunk(ways, dim=side)[rank] for t in (packed.data, packed.scales))
    return Packed(packed.form, *parts)


def _read(weights: SafeWeights, path: str, linear: PackedGroupedLinear) -> dict[str, torch.Tensor]:
    """What is stored of a linear of an expert, and what engines do not hold too."""
    form = linear.packed.form
    if linear.held:
        return {"scales": read_scales(weights, path, form)}
    packed = read_linear(weights, path, form)
    return {"data": packed.data, "scales": packed.scales}


def _put(
    linear: PackedGroupedLinear,
    expert: int,
    first_row: int,
    rows: int,
    parts: Mapping[str, torch.Tensor],
    path: str,
) -> None:
    """Copies parts of an expert's `rows` to their place."""
    for name, source in parts.items():
        here = getattr(linear.packed, name)[expert]
        start, stop = (
            row * here.shape[0] // linear.out_features for row in (first_row, first_row + rows)
        )
        mine = here[start:stop]
        if (source.shape, source.dtype) != (mine.shape, mine.dtype):
            raise ModelError(
                f"{path} has {name} {tuple(source.shape)} {source.dtype} on this rank; the model "
                f"has {tuple(mine.shape)} {mine.dtype}"
            )
        mine.copy_(source)


def held(chunks: Sequence[torch.nn.Module]) -> Mapping[str, int]:
    """Bytes of all that is packed, and of the buffers that it is dequantised in."""
    modules = (module for chunk in chunks for module in chunk.modules())
    packed = (getattr(module, "packed", None) for module in modules)
    nbytes = sum(one.nbytes for one in packed if isinstance(one, Packed))
    return {"packed": nbytes, "scratch": SCRATCH.nbytes}
