"""Exported adapters, loaded by the real PEFT onto transformers' models."""

import json
import re
import weakref
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from peft import PeftModel
from published_configs import PUBLISHED, hf_model, shrunk
from safetensors.numpy import load_file

from lora_moe_rl.adapters import peft, peft_import
from lora_moe_rl.adapters.families import ModelShape, hf_path
from lora_moe_rl.adapters.peft_config import peft_config
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import AdapterError
from lora_moe_rl.verify.hf import in_float64, merge

MIXED = {
    "rank": 4, "alpha": 8, "expert_alpha": 3,
    "rank_pattern": {"experts.*": 2, "experts.down": 3, "layers.1-2.*": 5, "layers.3.k_proj": 6},
    "alpha_pattern": {"layers.2.*": 1},
}  # fmt: skip
ADAPTERS = {
    "plain": {"rank": 4},
    "expert_rank": {"rank": 4, "expert_rank": 3, "alpha": 8, "expert_alpha": 8},
    "mixed": MIXED,
    "shared": {"rank": 4, "expert_rank": 2, "expert_layout": "shared_outer"},
    "olora": {"rank": 3, "init": "olora", "rslora": True},
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The models are tiny: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(name: str, adapter: dict):
    """(spec, random tensors, config, a tiny model with random weights)."""
    config = RunConfig(adapter=adapter)
    sizes = shrunk(PUBLISHED[name])
    if "Qwen" in name and "Qwen3.5" not in name:
        sizes["mlp_only_layers"] = [1]  # a dense layer, as the other families have
    shape = ModelShape.from_hf_config(sizes)
    spec = AdapterSpec.build(shape, config.adapter)
    generator = np.random.default_rng(0)
    tensors = {
        key: generator.standard_normal(size, dtype=np.float32) * np.float32(0.03)
        for key, size in spec.tensor_shapes.items()
    }
    torch.manual_seed(0)
    # The default kernel wants widths that are multiples of 16 bytes.
    model = hf_model(sizes, {"initializer_range": 0.1}, experts_implementation="eager")
    return spec, tensors, config, model.float().eval()


@torch.no_grad()
def logprobs(model) -> torch.Tensor:
    return model(torch.arange(1, 20)[None]).logits.log_softmax(-1)


def check_loaded_equals_merged(name: str, adapter: dict, directory, form: peft.Form):
    spec, tensors, config, model = make(name, adapter)
    peft.write(directory, spec, tensors, config, form)
    loaded = PeftModel.from_pretrained(model, directory).double()
    with in_float64(model):
        got = logprobs(loaded)
        model = loaded.unload()
        base = logprobs(model)
        merge(model, spec, tensors)
        torch.testing.assert_close(got, logprobs(model), rtol=0, atol=5e-6)
    assert (got - base).abs().mean() > 0.01


FORMS = ("2d", "3d")
# Kimi-K2 and Moonlight have DeepSeek-V3's architecture.
OTHERS = [n for n in PUBLISHED if n not in ("Qwen3-30B-A3B", "Kimi-K2", "Moonlight-16B-A3B")]
# PEFT finds experts of these in one form alone, which is what they are exported in.
ONE_FORM = {"GPT-OSS-20B": "3d", "Qwen3.5-35B-A3B": "3d", "Ling-mini-2.0": "2d"}
OF_OTHERS = [(n, form) for n in OTHERS for form in FORMS if ONE_FORM.get(n, form) == form]


@pytest.mark.filterwarnings("ignore:The following:RuntimeWarning")  # patterns of stacked experts
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [*ADAPTERS])
def test_peft_loads_what_was_exported(kind, form, tmp_path):
    check_loaded_equals_merged("Qwen3-30B-A3B", ADAPTERS[kind], tmp_path / "adapter", form)


@pytest.mark.filterwarnings("ignore:The following:RuntimeWarning")
@pytest.mark.parametrize("name, form", OF_OTHERS)
def test_peft_loads_every_site_of_other_families(name, form, tmp_path):
    if ModelShape.from_hf_config(PUBLISHED[name]).moe_layers:
        patterns = {"layers.3.*": 5, "layers.3.experts.up": 2, "layers.0.*": 2}
        adapter = {"rank": 4, "expert_rank": 3, "rank_pattern": patterns}
    else:
        patterns = {"layers.3.*": 5, "layers.3.mlp.up": 2, "layers.0.*": 2}
        adapter = {"rank": 4, "rank_pattern": patterns}
    check_loaded_equals_merged(name, adapter, tmp_path / "adapter", form)


def test_experts_that_are_modules_have_one_form(tmp_path):
    spec, tensors, config, _ = make("Ling-mini-2.0", {"rank": 4})
    with pytest.raises(AdapterError, match="take the form 2d"):
        peft.write(tmp_path / "a", spec, tensors, config, "3d")


def test_interleaved_experts_have_one_form(tmp_path):
    spec, tensors, config, _ = make("GPT-OSS-20B", {"rank": 4})
    with pytest.raises(AdapterError, match="take the form 3d"):
        peft.write(tmp_path / "a", spec, tensors, config, "2d")
    peft.write(tmp_path / "a", spec, tensors, config)  # as a run does
    found, read = peft_import.read(tmp_path / "a", spec.shape)
    assert {site.name for site in found} == {site.name for site in spec}
    for site in spec:
        mine, theirs = (
            one[f"{site.name}.B"] @ one[f"{site.name}.A"] * of.by_name[site.name].scale
            for one, of in ((tensors, spec), (read, found))
        )
        np.testing.assert_allclose(theirs, mine, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "name, targets",
    [
        *(("DeepSeek-V3", target) for target in ("experts.up", "experts.down", "mlp.*", "*_proj")),
        *(("Qwen1.5-MoE-A2.7B", target) for target in ("experts.*", "shared_expert.*")),
    ],
)
def test_peft_loads_a_part_of_the_sites(name, targets, form, tmp_path):
    check_loaded_equals_merged(name, {"rank": 4, "targets": (targets,)}, tmp_path / "a", form)


def test_patterns_are_as_short_as_ranks_allow():
    spec, _, config, _ = make("Qwen3-30B-A3B", {"rank": 4, "expert_rank": 2})
    written = peft_config(spec, config)
    assert (written["r"], written["lora_alpha"]) == (2, 32)  # alpha / r of the experts
    attention = [rf"self_attn\.{name}_proj" for name in "qkvo"]
    dense = [rf"mlp\.{name}_proj(\.weight)?" for name in ("gate", "up", "down")]
    assert written["rank_pattern"] == dict.fromkeys(attention + dense, 4)

    spec, _, config, _ = make("Qwen3-30B-A3B", MIXED)
    patterns = peft_config(spec, config)["rank_pattern"]
    assert patterns[r"layers\.(3)\.self_attn\.k_proj"] == 6  # 5 is the rank of most
    assert patterns[r"layers\.(0|3)\.mlp\.experts\.\d+\.down_proj"] == 3
    for site in spec:  # as PEFT looks a module up
        name = f"model.layers.{site.layer}.{hf_path(spec.shape, site.module)}".format(7)
        found = [r for key, r in patterns.items() if re.match(rf"(.*\.)?({key})$", name)]
        assert found in ([site.rank], []) and (found or site.rank == written_rank(spec, config))


def written_rank(spec: AdapterSpec, config: RunConfig) -> int:
    return peft_config(spec, config)["r"]


def test_a_shared_tensor_is_written_for_each_expert(tmp_path):
    spec, tensors, config, _ = make("Mixtral-8x7B", ADAPTERS["shared"])
    peft.write(tmp_path / "adapter", spec, tensors, config)
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    moe = "base_model.model.model.layers.1.block_sparse_moe.experts"
    for expert in range(5):
        up_a = written[f"{moe}.{expert}.w3.lora_A.weight"]
        np.testing.assert_array_equal(up_a, tensors["layers.1.experts.up.A"])
    assert written[f"{moe}.4.w2.lora_A.weight"].shape == (2, 28)


def test_files_of_an_interrupted_write_do_not_stay(tmp_path):
    spec, tensors, config, _ = make("Qwen3-30B-A3B", {"rank": 4})
    (tmp_path / ".adapter.lora_moe_rl.tmp").mkdir()
    for _ in range(2):
        peft.write(tmp_path / "adapter", spec, tensors, config)
    (tmp_path / "plain").touch()
    modes = {path.stat().st_mode for path in [*tmp_path.glob("adapter/*"), tmp_path / "plain"]}
    assert len(modes) == 1
    (tmp_path / "plain").unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert written == json.loads(json.dumps(peft_config(spec, config)))


class Asked(Mapping):
    """Tensors that are made when they are asked for. `held`: the most of them that anybody has had
    at once."""

    def __init__(self, shapes):
        self.shapes, self.alive, self.held = shapes, weakref.WeakSet(), 0

    def __getitem__(self, name):
        made = np.zeros(self.shapes[name], np.float32).view(Weak)
        self.alive.add(made)
        self.held = max(self.held, len(self.alive))
        return made

    def __iter__(self):
        return iter(self.shapes)

    def __len__(self):
        return len(self.shapes)


class Weak(np.ndarray):
    """An array that can be looked for after its end."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def test_no_more_than_a_layer_is_held_while_an_adapter_is_written(tmp_path):
    config = RunConfig()
    sizes = shrunk(PUBLISHED["Qwen3-30B-A3B"]) | {"num_hidden_layers": 12}
    spec = AdapterSpec.build(ModelShape.from_hf_config(sizes), config.adapter)
    tensors = Asked(spec.tensor_shapes)
    peft.write(tmp_path / "adapter", spec, tensors, config)
    of_layer = len(spec.tensor_shapes) // 12
    assert 0 < tensors.held <= 2 * of_layer
