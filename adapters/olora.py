"""OLoRA's start: an adapter that begins as a part of the base weight (arXiv:2406.01775).

Of a weight W `[out, in]` it takes

    Q = qr(W[:, :r]).Q        B0 = Q [out, r]        A0 = Q^T W [r, in]

so that `B0 A0` is W projected on its first r columns. The paper then trains A and B from A0 and B0
over the base `W - s B0 A0`. Here the base stays as it is, and what would be taken from it is the
frozen half of an adapter of rank 2r (`Site.frozen_rank`):

    y = W x + s (B A - B0 A0) x  =  W x + s [B, -B0] [A; A0] x

Export, refit and "adapters off" then mean the original base, and need to know nothing of this.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from lora_moe_rl.adapters.families import ModelShape, hf_layer, hf_path
from lora_moe_rl.adapters.spec import Site
from lora_moe_rl.errors import ModelError
from lora_moe_rl.files.untrusted import check_one_model

_FLOATS = ("F64", "F32", "F16", "BF16")  # safetensors' names


def olora(weight: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(A0 `[rank, in]`, B0 `[out, rank]`), float32, of a weight `[out, in]`.

    Raises ValueError for a rank above either dimension, which has no such factors.
    """
    if not 0 < rank <= min(weight.shape):
        raise ValueError(f"rank {rank} is not within a weight of shape {tuple(weight.shape)}")
    weight = weight.to(torch.float32)
    B0 = torch.linalg.qr(weight[:, :rank]).Q
    return B0.T @ weight, B0


class OLoRAStart:
    """The start of every site of a model, from the Hugging Face weights in its directory.

    One weight is read at a time, when it is asked for.
    """

    def __init__(self, model_dir: Path, shape: ModelShape):
        self.weights = BaseWeights(model_dir)
        self.shape = shape

    def tensors(self, site: Site, experts: range | None) -> tuple[np.ndarray, np.ndarray]:
        """(A0, B0) of one site, float32, whole: `[r, in]` and `[out, r]`, where r is the rank that
        is trained; with `experts`, global numbers, `[n, r, in]` and `[n, out, r]`.

        Raises ModelError for a base that has not the weight, or has it quantised.
        """
        pairs = [olora(weight, site.trained_rank) for weight in self._weights(site, experts)]
        A0, B0 = (torch.stack(parts).numpy() for parts in zip(*pairs, strict=True))
        return (A0[0], B0[0]) if experts is None else (A0, B0)

    def _weights(self, site: Site, experts: range | None) -> Iterator[torch.Tensor]:
        path = f"{hf_layer(self.shape, site.layer)}.{hf_path(self.shape, site.module)}"
        for expert in [None] if experts is None else experts:
            name = path.format(expert)
            weight = self.weights.read(name)
            if tuple(weight.shape) != (site.out_features, site.in_features):
                raise ModelError(
                    f"{name}.weight in {self.weights.directory} has shape {tuple(weight.shape)}; "
                    f"config.json says {(site.out_features, site.in_features)}"
                )
            yield weight


class BaseWeights:
    """Single weights of a Hugging Face directory of safetensors files, one or several."""

    def __init__(self, directory: Path):
        self.directory = Path(directory)

    @cached_property
    def files(self) -> dict[str, Path]:
        """`{key: the file that holds it}`."""
        index = self.directory / "model.safetensors.index.json"
        if index.is_file():
            names = json.loads(index.read_text())["weight_map"]
            check_one_model(index, set(names.values()))
            for file in set(names.values()):
                if Path(file).name != file:
                    raise ModelError(f"{index} names {file!r}, which is not a file beside it")
            return {key: self.directory / file for key, file in names.items()}
        single = self.directory / "model.safetensors"
        if not single.is_file():
            raise ModelError(f"{self.directory} has neither {single.name} nor {index.name}")
        with safe_open(single, framework="pt") as handle:
            return dict.fromkeys(handle.keys(), single)

    def read(self, name: str) -> torch.Tensor:
        """`{name}.weight` as float32. Raises ModelError when it is missing or not of floats."""
        key = f"{name}.weight"
        if key not in self.files:
            others = sorted(k for k in self.files if k.startswith(f"{name}."))
            found = f"only {', '.join(others)}: a quantised base" if others else "nothing of it"
            raise ModelError(f"{key} is not in {self.directory}, which has {found}. {_WAY_OUT}")
        path = self.files[key]
        if not path.is_file():
            raise ModelError(f"{path} is missing; the index says it holds {key}")
        with safe_open(path, framework="pt") as handle:
            if key not in handle.keys():  # noqa: SIM118  safetensors' handle is no mapping
                raise ModelError(f"{key} is not in {path}, where the index says it is")
            if (dtype := handle.get_slice(key).get_dtype()) not in _FLOATS:
                raise ModelError(
                    f"{key} in {path} is {dtype}: of a quantised base only the bytes are stored, "
                    f"and its scales elsewhere. {_WAY_OUT}"
                )
            return handle.get_tensor(key).to(torch.float32)


_WAY_OUT = (
    "adapter.init=olora starts from the base's own weights in a float dtype "
    f"({', '.join(_FLOATS)}); use such a checkpoint, or adapter.init=kaiming"
)
