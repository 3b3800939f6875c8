"""Values of quantised weights in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from lora_moe_rl.errors import ModelError
from lora_moe_rl.files.untrusted import SafeWeights
from lora_moe_rl.kernels.dequant import Form, Packed, dequantise
from lora_moe_rl.kernels.dequant.formats import bad_scales
from lora_moe_rl.models.quantised_names import TENSORS, form_of


def read(get: Callable[[str], torch.Tensor], names: Collection[str], name: str) -> torch.Tensor:
    """The weight `name` of a checkpoint with these `names`, in float32 when it is stored quantised.
    Raises ModelError for scales that are no scales."""
    path = name.rpartition(".")[0]
    form = form_of(path, names)
    if form is None:
        return get(name)
    data, scale, _ = TENSORS[form]
    scales = get(f"{path}.{scale}")
    if wrong := bad_scales(form, scales):
        raise ModelError(f"{path}.{scale}: {wrong}; fetch the file again")
    return dequantise(_packed(form, get(f"{path}.{data}"), scales), torch.float32)


def read_linear(weights: SafeWeights, path: str, form: Form) -> Packed:
    """One linear of a checkpoint, whole. Raises ModelError."""
    data, _, shape = TENSORS[form]
    scales = read_scales(weights, path, form)
    try:
        packed = _packed(form, weights.read(f"{path}.{data}"), scales)
    except (ValueError, RuntimeError) as error:
        raise ModelError(f"{path} in {weights.directory}: {error}") from error
    said = f"{path}.{shape}"
    if said in weights.file_of and tuple(weights.read(said).tolist()) != packed.shape:
        raise ModelError(
            f"{said} in {weights.directory} is {weights.read(said).tolist()}, and what is packed "
            f"has the shape {list(packed.shape)}"
        )
    return packed


def read_scales(weights: SafeWeights, path: str, form: Form) -> torch.Tensor:
    """The scales of a linear of a checkpoint. Raises ModelError when it is not there whole, and for
    scales that are no scales."""
    data, scale, _ = TENSORS[form]
    if missing := [n for n in (data, scale) if f"{path}.{n}" not in weights.file_of]:
        raise ModelError(
            f"{weights.directory} has no {path}.{missing[0]}: some of its routed experts are "
            f"{form}, and all of them must be"
        )
    scales = weights.read(f"{path}.{scale}")
    if wrong := bad_scales(form, scales):
        raise ModelError(f"{path}.{scale} in {weights.directory}: {wrong}; fetch the file again")
    return scales


def _packed(form: Form, data: torch.Tensor, scales: torch.Tensor) -> Packed:
    """compressed-tensors has the bytes of an MXFP4 weight's groups one after the other."""
    return Packed(form, data.view(*scales.shape, -1) if form == "mxfp4" else data, scales)
