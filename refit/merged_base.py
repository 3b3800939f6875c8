"""The base weights that adapters are merged into, from the model's own safetensors.

Every version is merged into what stands there, never into weights that hold an earlier version:
each would add its rounding to the one before.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lora_moe_rl.adapters.families import ModelShape, hf_path
from lora_moe_rl.errors import RefitError
from lora_moe_rl.files.untrusted import SafeWeights, inside, read_json

if TYPE_CHECKING:
    import torch

DTYPES = ("F32", "BF16", "F16")


class Base:
    """The linears of a Hugging Face directory, by our names. Raises FileError or ModelError for a
    directory that is not one."""

    def __init__(self, directory: str):
        self.directory = Path(directory)
        self.shape = ModelShape.from_hf_config(read_json(inside(self.directory, "config.json")))
        self.weights = SafeWeights.open(self.directory)
        self.stamps = self._stamps()

    def name(self, layer: int, module: str, expert: int | None = None) -> str:
        """The checkpoint's name of a linear, without `.weight`."""
        return f"model.layers.{layer}.{hf_path(self.shape, module).format(expert)}"

    def check(self, layer: int, module: str) -> None:
        """Raises RefitError or FileError unless the weight of a module (of routed experts: of each)
        is there as config.json says, and not quantised."""
        in_features, out_features, experts = self.shape.modules(layer)[module]
        for expert in [None] if experts is None else range(experts):
            entry = self.weights.entry(f"{self.name(layer, module, expert)}.weight")
            if entry.shape != (out_features, in_features):
                raise RefitError(
                    f"{self.directory}: {entry.name} is {entry.shape}, and config.json makes it "
                    f"{(out_features, in_features)}"
                )
            if entry.dtype not in DTYPES:
                raise RefitError(
                    f"{self.directory}: {entry.name} is {entry.dtype}; refit.mode=merged merges "
                    f"into {', '.join(DTYPES)} alone: use a model in one of them"
                )

    def weight(self, layer: int, module: str, expert: int | None = None) -> torch.Tensor:
        """`[out, in]`, in memory of its own."""
        return self.weights.read(f"{self.name(layer, module, expert)}.weight")

    def bias(self, layer: int, module: str) -> torch.Tensor | None:
        name = f"{self.name(layer, module)}.bias"
        return self.weights.read(name) if name in self.weights.file_of else None

    def check_unchanged(self) -> None:
        """Raises RefitError when a file is not the one that was there at the start."""
        now = self._stamps()
        if changed := sorted(name for name, stamp in self.stamps.items() if now[name] != stamp):
            raise RefitError(
                f"{self.directory / changed[0]} has changed since the engine started: adapters "
                "must be merged into the model that they were trained on; start the run again"
            )

    def _stamps(self) -> dict[str, tuple[int, int, int]]:
        stats = {name: file.path.stat() for name, file in self.weights.files.items()}
        return {name: (s.st_ino, s.st_size, s.st_mtime_ns) for name, s in stats.items()}
