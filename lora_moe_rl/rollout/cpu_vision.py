"""Mend for vLLM on the CPU: models of text and images are imported without torchvision.

Their files import, for images, a file of transformers that wants it, and the class of a language
model by itself is in one of them. While that file is imported, and only then, there is an empty
torchvision. Whatever would use it fails for what it lacks.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from lora_moe_rl.upstream.checks import require_version

WHO = "lora_moe_rl/rollout/cpu_vision.py"
WANTS_IT = "transformers.models.qwen2_vl.image_processing_qwen2_vl"
PARTS = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")


class _WithEmptyTorchvision:
    """Finds the one file."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != WANTS_IT:
            return None
        spec = PathFinder.find_spec(name, path, target)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def with_it(module: ModuleType) -> None:
            empty = {part: ModuleType(part) for part in PARTS}
            for one in empty.values():
                one.__path__ = []
            empty[f"{PARTS[-1]}.functional"] = ModuleType(f"{PARTS[-1]}.functional")
            sys.modules.update(empty)
            try:
                run(module)
            finally:
                for part in empty:
                    del sys.modules[part]

        spec.loader.exec_module = with_it
        return spec


def install() -> None:
    require_version("vllm", WHO)
    known = any(isinstance(finder, _WithEmptyTorchvision) for finder in sys.meta_path)
    if not known and importlib.util.find_spec("torchvision") is None:
        sys.meta_path.insert(0, _WithEmptyTorchvision())
