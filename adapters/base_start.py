"""An adapter that begins as a part of the base weight: at A0 and B0 of it (`starts.py`).

Those who proposed such starts then train A and B over the base `W - s B0 A0`. Here the base stays
as it is, and what would be taken from it is the frozen half of an adapter of rank 2r
(`Site.frozen_rank`):

    y = W x + s (B A - B0 A0) x  =  W x + s [B, -B0] [A; A0] x

Export, refit and "adapters off" then mean the original base. How it is computed with: `served.py`.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from lora_moe_rl.adapters.families import ModelShape, hf_layer, hf_path
from lora_moe_rl.adapters.spec import Site
from lora_moe_rl.adapters.starts import start
from lora_moe_rl.errors import ModelError
from lora_moe_rl.files.untrusted import check_one_model

log = logging.getLogger(__name__)

SAY_EVERY_S = 30.0
_FLOATS = ("F64", "F32", "F16", "BF16")  # safetensors' names


class BaseStart:
    """The start of every site of a model, from the Hugging Face weights in its directory.

    One weight is read at a time, when it is asked for, and its factors are found on `device`.
    """

    def __init__(self, init: str, model_dir: Path, shape: ModelShape, device: torch.device):
        """`init`: one of `starts.STARTS`."""
        self.init, self.shape, self.device = init, shape, device
        self.weights = BaseWeights(model_dir, init)
        self._done, self._said = 0, time.monotonic()

    def tensors(self, site: Site, experts: range | None) -> tuple[np.ndarray, np.ndarray]:
        """(A0, B0) of one site, float32, whole: `[r, in]` and `[out, r]`, where r is the rank that
        is trained; with `experts`, global numbers, `[n, r, in]` and `[n, out, r]`.

        Raises ModelError for a base that has not the weight, or has it quantised.
        """
        pairs = [
            start(self.init, weight.to(self.device), site.trained_rank, site.scale)
            for weight in self._weights(site, experts)
        ]
        A0, B0 = (torch.stack(parts).cpu().numpy() for parts in zip(*pairs, strict=True))
        self._say(len(pairs), site)
        return (A0[0], B0[0]) if experts is None else (A0, B0)

    def _say(self, weights: int, site: Site) -> None:
        """There may be tens of thousands, which takes minutes."""
        self._done += weights
        if time.monotonic() - self._said >= SAY_EVERY_S:
            self._said = time.monotonic()
            log.info("adapter.init=%s: %d weights so far, to %s", self.init, self._done, site.name)

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

    def __init__(self, directory: Path, init: str):
        """`init`: the start that they are read for, by its name."""
        self.directory, self.init = Path(directory), init

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
            raise ModelError(
                f"{key} is not in {self.directory}, which has {found}. {self._way_out}"
            )
        path = self.files[key]
        if not path.is_file():
            raise ModelError(f"{path} is missing; the index says it holds {key}")
        with safe_open(path, framework="pt") as handle:
            if key not in handle.keys():  # noqa: SIM118  safetensors' handle is no mapping
                raise ModelError(f"{key} is not in {path}, where the index says it is")
            if (dtype := handle.get_slice(key).get_dtype()) not in _FLOATS:
                raise ModelError(
                    f"{key} in {path} is {dtype}: of a quantised base only the bytes are stored, "
                    f"and its scales elsewhere. {self._way_out}"
                )
            return handle.get_tensor(key).to(torch.float32)

    @property
    def _way_out(self) -> str:
        return (
            f"adapter.init={self.init} starts from the base's own weights in a float dtype "
            f"({', '.join(_FLOATS)}); use such a checkpoint, or adapter.init=kaiming"
        )
