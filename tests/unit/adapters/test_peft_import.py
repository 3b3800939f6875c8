"""Foreign PEFT directories: what real PEFT wrote, what others write, and what is refused."""

import json
import time

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from published_configs import PUBLISHED, hf_config, shrunk
from safetensors.numpy import load_file, save_file

from lora_moe_rl.adapters import peft, peft_import
from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import AdapterError, FileError
from lora_moe_rl.verify.hf import merge

SIZES = shrunk(PUBLISHED["DeepSeek-V3"]) | {"first_k_dense_replace": 1, "num_hidden_layers": 2}
SHAPE = ModelShape.from_hf_config(SIZES)
MIXED = RunConfig(
    adapter={"rank": 4, "expert_rank": 3, "rank_pattern": {"experts.up": 2, "mlp.*": 5}}
)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The models are tiny: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(config=MIXED, shape=SHAPE):
    spec = AdapterSpec.build(shape, config.adapter)
    generator = np.random.default_rng(1)
    tensors = {
        name: generator.standard_normal(size, dtype=np.float32)
        for name, size in spec.tensor_shapes.items()
    }
    return spec, tensors


def deltas(spec, tensors):
    return {
        site.name: np.float32(site.scale) * (tensors[f"{site.name}.B"] @ tensors[f"{site.name}.A"])
        for site in spec
    }


def check_same(one, other):
    one, other = deltas(*one), deltas(*other)
    assert one.keys() == other.keys()
    for name, delta in one.items():
        np.testing.assert_allclose(delta, other[name], rtol=0, atol=2e-5 * np.abs(delta).max())


@pytest.fixture
def written(tmp_path):
    """A directory in the 2-D form, its arrays and config; `save` writes changed ones."""
    spec, tensors = make()
    peft.write(tmp_path / "a", spec, tensors, MIXED)
    return tmp_path / "a"


def change(directory, arrays=None, names=lambda name: name, **settings):
    """Writes other tensors, names or settings, as somebody else would have."""
    path = directory / "adapter_model.safetensors"
    arrays = load_file(path) if arrays is None else arrays
    save_file({names(name): value for name, value in arrays.items()}, path)
    config = json.loads((directory / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(json.dumps(config | settings))


@pytest.mark.parametrize("form", ["2d", "3d"])
def test_what_was_exported_is_read(form, tmp_path):
    spec, tensors = make()
    peft.write(tmp_path / "a", spec, tensors, MIXED, form)
    read = peft_import.read(tmp_path / "a", SHAPE)
    check_same(read, (spec, tensors))
    assert [site.rank for site in read[0]] == [site.rank for site in spec]


@pytest.mark.parametrize(
    ("name", "shared"),
    [
        ("Qwen3-30B-A3B", []),
        ("Mixtral-8x7B", []),
        ("DeepSeek-V3", []),
        ("Hy3", ["shared_experts.up_proj"]),  # which its checkpoint calls shared_mlp
    ],
)
def test_what_real_peft_trained_and_saved_is_read(name, shared, tmp_path):
    sizes = shrunk(PUBLISHED[name])
    hf = hf_config(sizes | {"initializer_range": 0.1})
    torch.manual_seed(0)
    make_model = transformers.AutoModelForCausalLM.from_config
    model = make_model(hf, experts_implementation="eager").float().eval()
    torch.manual_seed(0)
    plain = make_model(hf, experts_implementation="eager").float().eval()
    lora = LoraConfig(
        r=4,
        lora_alpha=6,
        use_rslora=True,
        target_modules=["o_proj", *shared],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        rank_pattern={"mlp.experts.gate_up_proj": 3},
        init_lora_weights=False,
    )
    trained = get_peft_model(model, lora)
    with torch.no_grad():
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.05)
        got = trained(torch.arange(1, 20)[None]).logits.log_softmax(-1)
    trained.save_pretrained(tmp_path)
    merge(plain, *peft_import.read(tmp_path, ModelShape.from_hf_config(sizes)))
    with torch.no_grad():
        ours = plain(torch.arange(1, 20)[None]).logits.log_softmax(-1)
    torch.testing.assert_close(ours, got, rtol=0, atol=5e-6)


@pytest.mark.parametrize(
    "names",
    [
        lambda name: name.removeprefix("base_model.model."),  # verl, ms-swift
        lambda name: name.replace(".weight", ".default.weight"),  # raw state dicts of PEFT
        lambda name: name.replace("model.model.", "model.model.language_model."),
    ],
)
def test_other_names_are_understood(names, written):
    before = peft_import.read(written, SHAPE)
    change(written, names=names)
    check_same(peft_import.read(written, SHAPE), before)


def slowest(arrays):
    """B with the expert slowest, as Unsloth had it and Megatron-Bridge writes it."""
    out = {}
    for name, value in arrays.items():
        if ".mlp.experts." in name and "lora_B" in name:
            value = value.reshape(len(value), -1, 5).transpose(0, 2, 1).reshape(len(value), -1)
        out[name] = np.ascontiguousarray(value)
    return out


@pytest.fixture
def stacked(tmp_path):
    """A dense (not block-diagonal) stack, of nobody known."""
    spec, tensors = make()
    peft.write(tmp_path / "a", spec, tensors, MIXED, "3d")
    arrays = load_file(tmp_path / "a" / "adapter_model.safetensors")
    generator = np.random.default_rng(2)
    for name, value in arrays.items():
        if ".experts." in name and "lora_B" in name:
            arrays[name] = generator.standard_normal(value.shape, dtype=np.float32)
    change(tmp_path / "a", arrays, peft_version="0.21.2")
    expected = peft_import.read(tmp_path / "a", SHAPE)
    return tmp_path / "a", arrays, expected


def test_the_order_of_stacked_experts_is_told_by_what_wrote_them(stacked):
    directory, arrays, expected = stacked
    change(directory, arrays, peft_version=None)
    with pytest.raises(AdapterError, match="names no peft_version.*--expert-order"):
        peft_import.read(directory, SHAPE)
    check_same(peft_import.read(directory, SHAPE, "fastest"), expected)
    change(directory, slowest(arrays))
    check_same(peft_import.read(directory, SHAPE, "slowest"), expected)
    change(directory, slowest(arrays), lora_B_layout="expert_major")
    check_same(peft_import.read(directory, SHAPE), expected)


def test_an_order_of_what_is_not_stacked_is_refused(tmp_path):
    peft.write(tmp_path / "a", *make(), MIXED, "2d")
    with pytest.raises(AdapterError, match="--expert-order slowest has no effect"):
        peft_import.read(tmp_path / "a", SHAPE, "slowest")


def test_unsloths_order_is_not_guessed(stacked):
    directory, arrays, expected = stacked
    change(directory, arrays, auto_mapping={"unsloth_fixed": True})
    with pytest.raises(AdapterError, match="Unsloth, whose order changed"):
        peft_import.read(directory, SHAPE)
    change(directory, arrays, lora_B_layout="rank_major")
    check_same(peft_import.read(directory, SHAPE), expected)


@pytest.mark.parametrize("order", ["fastest", "slowest"])
def test_zeros_between_gate_and_up_tell_the_order(order, tmp_path):
    config = RunConfig(adapter={"rank": 4, "targets": ("experts.gate", "experts.up")})
    spec, tensors = make(config)
    peft.write(tmp_path / "a", spec, tensors, config, "3d")
    arrays = load_file(tmp_path / "a" / "adapter_model.safetensors")
    arrays = {n: v for n, v in arrays.items() if "base_layer" in n}
    change(tmp_path / "a", slowest(arrays) if order == "slowest" else arrays)
    check_same(peft_import.read(tmp_path / "a", SHAPE), (spec, tensors))


def test_old_pefts_orientation_is_seen_by_shape(stacked):
    directory, arrays, expected = stacked
    for name in [name for name in arrays if ".experts." in name and "lora_A" in name]:
        A, B = arrays[name], arrays[name.replace("lora_A", "lora_B")]
        of_expert = B.reshape(len(B), -1, 5).transpose(2, 1, 0)  # [E, r, out]
        arrays[name] = np.ascontiguousarray(of_expert.reshape(-1, len(B)))
        fastest = A.reshape(5, -1, A.shape[1]).transpose(2, 1, 0)  # [in, r, E]
        swapped = np.ascontiguousarray(fastest.reshape(A.shape[1], -1))
        arrays[name.replace("lora_A", "lora_B")] = swapped
    change(directory, arrays, peft_version="0.18.0")
    check_same(peft_import.read(directory, SHAPE), expected)


# ----- faults --------------------------------------------------------------------------------

EXPERT = "base_model.model.model.layers.1.mlp.experts.4.up_proj"
Q = "base_model.model.model.layers.0.self_attn.q_b_proj"


def without(name):
    return lambda arrays: {n: v for n, v in arrays.items() if not n.startswith(name)}


def put(name, value):
    return lambda arrays: arrays | {name: value(arrays[name]) if callable(value) else value}


def spoil(value, number):
    value = value.copy()
    value.flat[3] = number
    return value


FAULTS = {
    "no B": (without(f"{EXPERT}.lora_B"), "up_proj.lora_A.weight has no lora_B beside it"),
    "no A": (without(f"{Q}.lora_A"), "q_b_proj.lora_B.weight has no lora_A beside it"),
    "an expert less": (without(f"{EXPERT}."), r"5 experts; the adapter lacks \[4\] and has none"),
    "an expert more": (
        lambda arrays: arrays | {n.replace("4.up", "5.up"): v for n, v in arrays.items()},
        r"lacks none and has \[5\]",
    ),
    "unknown": (
        put(f"{Q[:-8]}x_proj.lora_A.weight", np.ones((4, 4), np.float32)),
        "match no site.*x_proj",
    ),
    "layer": (
        put(f"{Q.replace('0', '7')}.lora_A.weight", np.ones((4, 4), np.float32)),
        "match no site",
    ),
    "lm_head": (
        put("base_model.model.lm_head.lora_A.weight", np.ones((4, 4), np.float32)),
        "lm_head",
    ),
    "nan": (
        put(f"{Q}.lora_A.weight", lambda v: spoil(v, np.nan)),
        "q_b_proj.lora_A.weight holds NaN",
    ),
    "inf": (
        put(f"{EXPERT}.lora_B.weight", lambda v: spoil(v, np.inf)),
        "up_proj.lora_B.weight holds NaN",
    ),
    "shape": (put(f"{Q}.lora_A.weight", lambda v: v[:, 1:]), r"need \(r, 18\)"),
    "rank": (put(f"{Q}.lora_A.weight", lambda v: v[1:]), r"need \(r, 18\)"),
    "integers": (
        put(f"{Q}.lora_A.weight", lambda v: v.astype(np.int32)),
        "is I32; adapters are of",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_tensors_is_refused(fault, written):
    damage, message = FAULTS[fault]
    path = written / "adapter_model.safetensors"
    damaged = {n: np.ascontiguousarray(v) for n, v in damage(load_file(path)).items()}
    change(written, damaged)
    with pytest.raises(AdapterError, match=message):
        peft_import.read(written, SHAPE)


SETTINGS = {
    "use_dora": (True, "use_dora=True: only plain LoRA"),
    "use_bdlora": ({"nblocks": 2}, "use_bdlora=.*only plain LoRA"),
    "init_lora_weights": ("olora", "init_lora_weights='olora': .*path_initial_model_for_weight_co"),
    "bias": ("all", "bias='all'"),
    "modules_to_save": (["lm_head"], "modules_to_save"),
    "peft_type": ("IA3", "peft_type='IA3'"),
    "r": (0, "the rank or alpha 0"),
    "lora_alpha": (float("inf"), "the rank or alpha inf"),
    "rank_pattern": ({"down_proj": 7}, "down_proj has rank 5 in its tensors and 7"),
    "alpha_pattern": ({"(a+)+": 7}, "which is not matched"),
}


@pytest.mark.parametrize("key", SETTINGS)
def test_a_config_that_is_not_plain_lora_is_refused(key, written):
    value, message = SETTINGS[key]
    change(written, **{key: value})
    with pytest.raises(AdapterError, match=message):
        peft_import.read(written, SHAPE)


@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize("pattern", [r"(.|\w)*[!?]", r"(.|\w)*\d\d\d"])
def test_a_pattern_that_takes_for_ever_is_given_up(key, pattern, written):
    change(written, **{key: {pattern: 7}})
    started = time.monotonic()
    with pytest.raises(AdapterError, match="which takes for ever to match model.layers.0."):
        peft_import.read(written, SHAPE)
    assert time.monotonic() - started < 20


def test_flipped_bits_of_our_own_files_are_seen(written):
    path = written / "adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    with pytest.raises(AdapterError, match="corrupt"):
        peft_import.read(written, SHAPE)


def test_a_truncated_file_and_a_header_that_claims_more_are_refused(written):
    path = written / "adapter_model.safetensors"
    data = path.read_bytes()
    for cut in (0, 7, 100, len(data) - 1):
        path.write_bytes(data[:cut])
        with pytest.raises(FileError):
            peft_import.read(written, SHAPE)
    path.write_bytes((len(data) * 8).to_bytes(8, "little") + data[8:])
    with pytest.raises(FileError, match="header claims"):
        peft_import.read(written, SHAPE)


def test_a_tensor_larger_than_any_adapter_is_refused_before_any_is_read(written, monkeypatch):
    widest = max(size for dims in SHAPE.modules(0).values() for size in dims[:2])
    arrays = load_file(written / "adapter_model.safetensors")
    name = next(name for name in arrays if ".layers.0.self_attn." in name and "lora_A" in name)
    inputs = arrays[name].shape[1]
    change(written, arrays | {name: np.zeros((2 * widest**2 // inputs + 1, inputs), np.float32)})

    def read(weights, name):
        raise AssertionError(f"{name} is read")

    monkeypatch.setattr(peft_import, "_array", read)
    with pytest.raises(AdapterError, match=rf"{name} has the shape .* widest linear has {widest}"):
        peft_import.read(written, SHAPE)


def test_pickles_are_refused_and_never_opened(written, tmp_path):
    (written / "adapter_model.safetensors").unlink()
    sentinel = tmp_path / "ran"

    class Attack:
        def __reduce__(self):
            return (open, (str(sentinel), "w"))

    torch.save(Attack(), written / "adapter_model.bin")
    with pytest.raises(FileError, match="pickles can run code"):
        peft_import.read(written, SHAPE)
    assert not sentinel.exists()


def test_names_that_lead_out_of_the_directory_are_refused(written, tmp_path):
    path = written / "adapter_model.safetensors"
    outside = tmp_path / "outside.safetensors"
    path.rename(outside)
    path.symlink_to(outside)
    with pytest.raises(FileError, match="outside of it"):
        peft_import.read(written, SHAPE)
    path.unlink()
    index = written / "adapter_model.safetensors.index.json"
    for name in ("../outside.safetensors", str(outside)):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(load_file(outside), name)}))
        with pytest.raises(FileError, match="no name of a file in its own directory"):
            peft_import.read(written, SHAPE)


def test_scales_of_experts_that_are_too_far_apart_are_refused(written):
    """Rather than folded into infinity."""
    change(written, alpha_pattern={r".*experts\.0\..*": 1e-20, r".*experts\.1\..*": 1e25})
    with pytest.raises(AdapterError, match="the experts' scales are too far apart for one tensor"):
        peft_import.read(written, SHAPE)


@pytest.mark.parametrize("form", ["2d", "3d"])
def test_what_an_export_has_filled_with_zeros_comes_back_as_it_was(tmp_path, form):
    """PEFT's form has gate, up and down of adapted experts, and vLLM's one rank: zeros in A and B,
    which could never be trained."""
    config = RunConfig(adapter={"rank": 4, "targets": ["experts.down", "o_proj"]})
    spec, tensors = make(config)
    peft.write(tmp_path / "few", spec, tensors, config, form)
    found = peft_import.read(tmp_path / "few", SHAPE)
    assert {site.name for site in found[0]} == {site.name for site in spec}
    check_same(found, (spec, tensors))
    padded = peft.for_vllm(spec, tensors)
    assert {site.rank for site in padded[0]} == {8}
    peft.write(tmp_path / "padded", *padded, config, form)
    found = peft_import.read(tmp_path / "padded", SHAPE)
    assert {site.rank for site in found[0]} == {4}
    check_same(found, (spec, tensors))


def test_a_fresh_adapter_is_one_and_one_of_zeros_alone_is_none(tmp_path):
    spec, tensors = make()
    fresh = {name: one * (not name.endswith(".B")) for name, one in tensors.items()}
    peft.write(tmp_path / "fresh", spec, fresh, MIXED)
    assert len(peft_import.read(tmp_path / "fresh", SHAPE)[0].sites) == len(spec.sites)
    peft.write(tmp_path / "none", spec, {name: 0 * one for name, one in tensors.items()}, MIXED)
    with pytest.raises(AdapterError, match="all tensors of the adapter are zero"):
        peft_import.read(tmp_path / "none", SHAPE)
