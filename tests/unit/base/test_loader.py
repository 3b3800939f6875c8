"""What an engine reads of the checkpoint where its base is held."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from plain_checkpoint import save_plain
from quantised import make_pair
from safetensors.torch import load_file, save_file

from lora_moe_rl.base.held import Held
from lora_moe_rl.errors import HeldBaseError
from lora_moe_rl.files.untrusted import SafeWeights
from lora_moe_rl.refit.merged_base import Base

pytestmark = pytest.mark.seconds


def read_of(folder, monkeypatch) -> dict:
    """What the loader hands to vLLM; each is a tensor that was read, and no other is."""
    from lora_moe_rl.base.loader import HeldLoader

    held, base = Held("", str(folder), "float32", 1, False, True), Base(str(folder))
    loader = HeldLoader.__new__(HeldLoader)
    loader.model_dir, loader.not_read = str(folder), set(held.not_read(base))
    read, names = SafeWeights.read, []
    monkeypatch.setattr(
        SafeWeights, "read", lambda self, name: names.append(name) or read(self, name)
    )
    found = dict(loader.get_all_weights(None, None))
    assert sorted(names) == sorted(found)
    return found


def test_linears_embedding_head_and_experts_are_not_read(tmp_path, monkeypatch):
    folder = save_plain(tmp_path / "model")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    norm = tensors["lm_head.weight"][0].clone()
    bias = tensors["model.layers.0.self_attn.q_proj.weight"][:, 0].clone()
    others = {"model.norm.weight": norm, "model.layers.0.self_attn.q_proj.bias": bias}
    save_file(tensors | others, path)
    found = read_of(folder, monkeypatch)
    assert found.keys() == others.keys()
    assert found["model.norm.weight"].equal(norm)


def test_scales_of_fp8_experts_are_read_and_their_weights_are_not(tmp_path, monkeypatch):
    packed, _ = make_pair("qwen3_moe", tmp_path, "fp8")
    kinds = {
        name.partition(".experts.")[2].partition(".")[2]
        for name in read_of(packed, monkeypatch)
        if ".experts." in name
    }
    assert kinds == {f"{one}_proj.weight_scale_inv" for one in ("gate", "up", "down")}


def layer_of(method: str, experts: str, **attributes):
    """A layer of routed experts whose method has chosen a class of experts, of vLLM's names."""
    from lora_moe_rl.base import loader

    (kind,) = (one for one in loader.kept_on_gpus() if one.__name__ == method)
    chosen = next(
        getattr(module, experts)
        for name in ("triton_moe", "triton_deep_gemm_moe", "marlin_moe", "cutlass_moe", "cpu_moe")
        if hasattr(module := import_module(f"{EXPERTS}.{name}"), experts)
    )
    made = kind.__new__(kind)
    vars(made).update({"experts_cls": chosen} | attributes)
    return SimpleNamespace(quant_method=made)


EXPERTS = "vllm.model_executor.layers.fused_moe.experts"
INT4, FP8 = "CompressedTensorsWNA16MoEMethod", "Fp8MoEMethod"
MXFP4, NUMBERS = "CompressedTensorsW4A4Mxfp4MoEMethod", "UnquantizedFusedMoEMethod"


@pytest.mark.parametrize(
    ("method", "experts", "held"),
    [
        (NUMBERS, "TritonExperts", "w13_weight w2_weight"),
        (FP8, "TritonExperts", "w13_weight w2_weight"),
        (
            INT4,
            "MarlinExperts",
            "w13_weight_packed w2_weight_packed w13_weight_scale w2_weight_scale",
        ),
        (MXFP4, "MarlinExperts", "w13_weight w2_weight w13_weight_scale w2_weight_scale"),
        (FP8, "TritonOrDeepGemmExperts", None),
        (FP8, "MarlinExperts", None),
        (INT4, "TritonWNA16Experts", None),
        (INT4, "BatchedMarlinExperts", None),
        (MXFP4, "CutlassExpertsMxfp4", None),
        (NUMBERS, "CPUUnquantizedExperts", None),
    ],
)
def test_experts_that_another_class_lays_out_are_refused_by_name(method, experts, held):
    from lora_moe_rl.base import loader

    layer = layer_of(method, experts)
    if held is not None:
        assert loader._stacks("layer", layer, loader.kept_on_gpus()) == tuple(held.split())
        return
    with pytest.raises(HeldBaseError, match=f"layer: vLLM would lay its experts.*{experts}"):
        loader._stacks("layer", layer, loader.kept_on_gpus())


def test_a_layout_for_rounded_activations_is_refused():
    from lora_moe_rl.base import loader

    layer = layer_of(INT4, "MarlinExperts", is_marlin=True, input_dtype=torch.int8)
    with pytest.raises(HeldBaseError, match=r"torch\.int8 \(VLLM_MARLIN_INPUT_DTYPE\)"):
        loader._stacks("layer", layer, loader.kept_on_gpus())
