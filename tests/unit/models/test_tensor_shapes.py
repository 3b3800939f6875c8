"""Tensors of other shapes than config.json gives them are named before a model is built."""

import json
import re

import pytest
import torch
from published_configs import PUBLISHED, SMALL_DEEPSEEK_V3, hf_model, shrunk
from safetensors.torch import load_file, save_file

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.errors import ModelError
from lora_moe_rl.files.untrusted import SafeFile
from lora_moe_rl.models.directory import check_model_dir
from lora_moe_rl.models.tensor_shapes import check_shapes

pytestmark = pytest.mark.seconds  # imports transformers


@pytest.fixture
def saved(tmp_path, request):
    """A directory that transformers wrote, of the config of `param`."""
    config = request.param
    torch.manual_seed(0)
    hf_model(config).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def caught(folder, tensors) -> bool:
    save_file(tensors, folder / "model.safetensors")
    try:
        check_model_dir(folder)
    except ModelError:
        return True
    return False


@pytest.mark.parametrize("saved", map(shrunk, PUBLISHED.values()), ids=PUBLISHED, indirect=True)
def test_what_transformers_writes_passes_and_any_other_shape_is_caught(saved):
    """But of the gate of Qwen2-MoE's shared expert, one row: Megatron-Bridge checks that."""
    check_model_dir(saved)
    tensors = load_file(saved / "model.safetensors")
    passed = set()
    for name, right in tensors.items():
        if ".visual." in name:  # a part that is left out
            continue
        longer = torch.zeros(*right.shape[:-1], right.shape[-1] + 1)
        if not caught(saved, tensors | {name: longer}):
            passed.add(re.sub(r".*layers\.\d+\.", "", name))
    assert passed <= {"mlp.shared_expert_gate.weight"}


@pytest.mark.parametrize("saved", [SMALL_DEEPSEEK_V3], indirect=True)
def test_file_tensor_both_shapes_and_the_way_out_are_named(saved):
    tensors = load_file(saved / "model.safetensors")
    name = "model.layers.1.mlp.experts.3.gate_proj.weight"
    right = list(tensors[name].shape)
    tensors[name] = torch.zeros(7, 5)
    save_file(tensors, saved / "model.safetensors")
    with pytest.raises(ModelError) as error:
        check_model_dir(saved)
    told = f"{saved}/model.safetensors: {name} is [7, 5], and config.json makes it {right}: "
    assert str(error.value).startswith(told + "weights and config.json are of two models; fetch")


@pytest.mark.parametrize("saved", [SMALL_DEEPSEEK_V3], indirect=True)
def test_many_are_counted_and_a_prediction_layer_is_passed_over(saved):
    tensors = load_file(saved / "model.safetensors")
    tensors["model.layers.2.eh_proj.weight"] = torch.zeros(3)  # as DeepSeek-V3 publishes it
    tensors["model.layers.2.input_layernorm.weight"] = torch.zeros(3)
    config = json.loads((saved / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (saved / "config.json").write_text(json.dumps(config))
    assert not caught(saved, tensors)
    (saved / "config.json").write_text(json.dumps(config | {"vocab_size": 77, "hidden_size": 64}))
    with pytest.raises(ModelError, match=r"embed_tokens.*; and \d+ more: weights and config.json"):
        check_model_dir(saved)


@pytest.mark.parametrize(
    ("tensor", "right"),
    [
        (torch.zeros(14, 6, dtype=torch.int32), True),
        (torch.zeros(14, 24, dtype=torch.uint8), True),
        (torch.zeros(14, 24, dtype=torch.int32), False),
        (torch.zeros(14, 6, dtype=torch.uint8), False),
        (torch.zeros(14, 48), True),  # no form of which anything is known
    ],
)
def test_packed_values_are_of_the_shape_of_their_linear(tmp_path, tensor, right):
    """INT4: 8 of a row of 48 in a word; MXFP4: 2 in a byte."""
    shape = ModelShape.from_hf_config(shrunk(PUBLISHED["Kimi-K2"]))
    name = "model.layers.1.mlp.experts.0.gate_proj.weight_packed"
    save_file({name: tensor}, tmp_path / "one.safetensors")
    file = SafeFile.open(tmp_path / "one.safetensors")
    if right:
        check_shapes([file], shape)
        return
    with pytest.raises(ModelError, match=r"weight_packed is \[14, "):
        check_shapes([file], shape)


@pytest.mark.parametrize("saved", [SMALL_DEEPSEEK_V3], indirect=True)
def test_layers_and_experts_that_lack_or_are_too_many_are_named(saved):
    tensors = load_file(saved / "model.safetensors")
    config = json.loads((saved / "config.json").read_text())
    layers, experts = config["num_hidden_layers"], config["n_routed_experts"]
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    one_less = {key: value for key, value in tensors.items() if key != name}

    def refused(tensors, told, **changed):
        (saved / "config.json").write_text(json.dumps(config | changed))
        save_file(tensors, saved / "model.safetensors")
        with pytest.raises(ModelError, match=re.escape(told)) as error:
            check_model_dir(saved)
        assert str(error.value).startswith(f"{saved}: config.json has ")

    told = f"layers.1.mlp.experts.N.up_proj.weight is there for {experts - 1} of {experts} experts"
    refused(one_less, told)
    refused(tensors, f"layer {layers} has no tensors", num_hidden_layers=layers + 1)
    fewer = {"num_hidden_layers": layers - 1, "num_nextn_predict_layers": 0}
    refused(tensors, f"there is a layer {layers - 1}", **fewer)
    (saved / "config.json").write_text(json.dumps(config | fewer | {"num_nextn_predict_layers": 1}))
    check_model_dir(saved)
