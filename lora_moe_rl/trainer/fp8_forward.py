"""`trainer.fp8_forward=engine`: linears that the checkpoint has in FP8 read their activations in 8
bits, as the engine's do; adapters read them as they are, there and here.

The backward is that of the dequantised weights: a gradient passes the rounding as it comes. Left
out is MLA's kv_b, which the engine multiplies into its neighbours when it decodes, and whose inputs
it does not quantise then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from lora_moe_rl.adapters.families import ModelShape, hf_path
from lora_moe_rl.adapters.sharding import FUSED
from lora_moe_rl.errors import ModelError
from lora_moe_rl.files.untrusted import SafeWeights, read_json
from lora_moe_rl.kernels.dequant.formats import FP8_BLOCK
from lora_moe_rl.kernels.fp8_rounding import rounded
from lora_moe_rl.models.quantised_names import form_of

NOT_ROUNDED = "kv_b_proj"


def install(chunks: Sequence[torch.nn.Module], model_dir: Path) -> None:
    """Makes this rank's FP8 linears read rounded activations. Raises ModelError for a linear where
    the engine's groups of inputs are not ours, or that normalises its inputs itself."""
    shape = ModelShape.from_hf_config(read_json(model_dir / "config.json"))
    with SafeWeights.open(model_dir) as weights:
        for path, linear, whole in _fp8_linears(chunks, shape, weights):
            _check(path, linear, whole)
            linear.register_forward_pre_hook(_round_first)


def _round_first(linear: torch.nn.Module, args: tuple) -> tuple:
    x, *rest = args
    return rounded(x), *rest


def _fp8_linears(
    chunks: Sequence[torch.nn.Module], shape: ModelShape, weights: SafeWeights
) -> Iterator[tuple[str, torch.nn.Module, int]]:
    """(path of its first module in the checkpoint, linear, its inputs over all ranks)."""
    for chunk in chunks:
        for layer in getattr(chunk, "module", chunk).decoder.layers:
            number, found = layer.layer_number - 1, dict(layer.named_modules())
            dims = shape.modules(number)
            for path, (module, *_) in FUSED.items():
                if path not in found or module not in dims or module == NOT_ROUNDED:
                    continue
                stored = f"model.layers.{number}.{hf_path(shape, module)}".format(0)
                if form_of(stored, weights.file_of) == "fp8":
                    yield stored, found[path], dims[module][0]


def _check(path: str, linear: torch.nn.Module, whole: int) -> None:
    if hasattr(linear, "layer_norm_weight"):
        raise ModelError(
            f"{path}: Transformer Engine normalises and multiplies in one, so that what is "
            "multiplied cannot be rounded; set trainer.fp8_forward=dequantise"
        )
    weight = getattr(linear, "weight", None)
    inputs = linear.in_features if weight is None else weight.shape[1]
    if inputs != whole and inputs % FP8_BLOCK:
        raise ModelError(
            f"{path} has {inputs} of its {whole} inputs on this rank, which are not whole groups "
            f"of {FP8_BLOCK}; use a smaller trainer.tp, or trainer.fp8_forward=dequantise"
        )
