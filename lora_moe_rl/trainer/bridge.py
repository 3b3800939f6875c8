"""Megatron-Bridge, made to build and load without Transformer Engine.

Three mends, each here alone: a stub of `transformer_engine`, which Bridge imports by name; its
packages of all the models that it knows, which are imported when somebody asks for one of them; and
the class names of our leaf modules. A model family's bridge stands in its file,
`adapters/families/`.
"""

from __future__ import annotations

import logging
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_moe_rl.adapters.families import FAMILIES, language_config
from lora_moe_rl.config.trainer import has_transformer_engine
from lora_moe_rl.files.untrusted import read_json
from lora_moe_rl.upstream.checks import require_version
from lora_moe_rl.upstream.transformers_import import import_transformers

if TYPE_CHECKING:
    import torch

# Their `__init__.py` import every model's bridge and provider, a fifth of what a rank imports.
# `megatron.bridge` wants that done; what we use of them stands in modules of their own.
ALL_MODELS = ("megatron.bridge.models", "megatron.bridge.diffusion.models")


def load():
    """Imports and prepares Megatron-Bridge; returns `AutoBridge`. Idempotent."""
    require_version("megatron-bridge", "lora_moe_rl/trainer/bridge.py")
    if not has_transformer_engine():
        import megatron.core.extensions.transformer_engine  # noqa: F401  sees that there is none

        _stub_transformer_engine()
    import_transformers()
    finder = _WhenAsked()
    sys.meta_path.insert(0, finder)
    try:
        with quietly():
            from megatron.bridge import AutoBridge

            _register_local_modules()
            _register_families()
    finally:
        sys.meta_path.remove(finder)
    return AutoBridge


@contextmanager
def quietly() -> Iterator[None]:
    """Inside, nobody logs below warnings, or warns: Megatron-core and Bridge tell of everything
    that is not installed, with stacks."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)


def source_of(model_dir: Path, dtype: torch.dtype) -> Any:
    """An `AutoBridge` of a Hugging Face directory: of the language model in it alone."""
    auto_bridge = load()
    config = read_json(model_dir / "config.json")
    if (inside := FAMILIES[config["architectures"][0]].inside) is None:
        return auto_bridge.from_hf_pretrained(str(model_dir), dtype=dtype)
    import transformers
    from megatron.bridge.models.hf_pretrained.causal_lm import PreTrainedCausalLM

    pretrained = PreTrainedCausalLM.from_pretrained(str(model_dir), dtype=dtype)
    config_class = getattr(transformers, inside.architecture).config_class
    pretrained.config = config_class.from_dict(dict(language_config(config)))
    return auto_bridge(pretrained)


class _WhenAsked:
    """Finds ALL_MODELS: packages whose `__init__.py` runs when a name is wanted of them that is no
    module of theirs which is imported already."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in ALL_MODELS:
            return None
        spec = PathFinder.find_spec(name, path, target)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def later(module: types.ModuleType) -> None:
            def asked(wanted: str) -> Any:
                if wanted.startswith("__"):
                    raise AttributeError(wanted)
                del module.__getattr__
                run(module)
                return getattr(module, wanted)

            module.__getattr__ = asked

        spec.loader.exec_module = later
        return spec


def _stub_transformer_engine() -> None:
    if "transformer_engine" in sys.modules:
        return
    import torch

    engine = types.ModuleType("transformer_engine")
    pytorch = types.ModuleType("transformer_engine.pytorch")
    engine.__path__, pytorch.__path__ = [], []
    engine.pytorch, engine.__version__ = pytorch, "0.0"
    for name in ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear", "TransformerLayer"):
        stub = type(name, (torch.nn.Module,), {"__module__": pytorch.__name__})
        setattr(pytorch, name, stub)
    pytorch.ops = types.SimpleNamespace(Sequential=type("Sequential", (torch.nn.Module,), {}))
    sys.modules[engine.__name__], sys.modules[pytorch.__name__] = engine, pytorch


def _register_local_modules() -> None:
    from megatron.bridge.models.conversion.param_mapping import AutoMapping

    AutoMapping.register_module_type("ColumnGroupedLinear", "column")
    AutoMapping.register_module_type("RowGroupedLinear", "row")
    AutoMapping.register_module_type("ZeroCentred", "replicated")
    AutoMapping.register_module_type("PackedGatedDeltaNet", "column")
    AutoMapping.register_module_type("PackedAttention", "column")  # its sinks
    AutoMapping.register_module_type("NormOverHeads", "column")


@cache
def _register_families() -> None:
    """Registers our families' bridges, in place of upstream's where it has some. The class of the
    provider is that of the upstream bridge that a family's stands before."""
    import transformers
    from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
    from megatron.core.models.gpt.gpt_model import GPTModel

    for architecture, family in FAMILIES.items():
        if family.inside is not None:  # the bridge is that of the model by itself
            continue
        register = MegatronModelBridge.register_bridge(
            source=getattr(transformers, architecture, architecture),
            target=GPTModel,
            model_type=family.model_types[0],
        )
        register(family.bridge())
