"""Merged checkpoints: every family and form of the base, and what may go wrong on the way."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pytest
import tiny_families
import torch
from merge_bases import (
    expected_weights,
    looks_whole,
    random_adapter,
    read_all,
    shards_of,
    spec_of,
)

from lora_moe_rl.config import AdapterConfig
from lora_moe_rl.errors import AdapterError, ExportError, FileError
from lora_moe_rl.export.merged import export_merged
from lora_moe_rl.export.merged_weights import Form
from lora_moe_rl.files.untrusted import SafeWeights
from lora_moe_rl.verify import hf


def test_experts_with_gate_and_up_in_turn_are_not_merged(tmp_path):
    base = tmp_path / "base"
    tiny_families.save("gpt_oss", base)
    spec = spec_of(base)
    with pytest.raises(ExportError, match="gate and up in turn, which a merge does not write"):
        export_merged(spec, random_adapter(spec), base, tmp_path / "out")
    assert not (tmp_path / "out").exists()


NOT_STACKED = {
    "qwen3": "a dense model has no experts to stack",
    "bailing_moe_v2": "its code has experts one by one",
    "hy_v3": "transformers' own names for shared experts are those of no checkpoint",
}


@pytest.mark.parametrize("layout", ["per expert", "stacked"])
@pytest.mark.parametrize("family", [one for one in tiny_families.FAMILIES if one != "gpt_oss"])
def test_merged_equals_weights_merged_by_hand(family, layout, tmp_path):
    if layout == "stacked" and (why := NOT_STACKED.get(family)):
        pytest.skip(why)
    base = tmp_path / "base"
    model = tiny_families.save(family, base)
    if layout == "stacked":
        model.save_pretrained(
            tmp_path / "stacked", save_original_format=False, max_shard_size="300KB"
        )
        shutil.copy(base / "config.json", tmp_path / "stacked")
        base = tmp_path / "stacked"
        assert any(name.endswith("experts.gate_up_proj") for name in read_all(base))
    spec = spec_of(base)
    tensors = random_adapter(spec)
    export_merged(spec, tensors, base, tmp_path / "out")
    found, by_hand = hf.load(tmp_path / "out"), hf.load(base)
    untouched = {name: value.clone() for name, value in by_hand.state_dict().items()}
    hf.merge(by_hand, spec, tensors)
    changed = 0
    for name, expected in by_hand.state_dict().items():
        value = found.state_dict()[name]
        if torch.equal(expected, untouched[name]):
            assert torch.equal(value, expected), name
        else:
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-6)
            assert (value - untouched[name]).abs().max() > 1e-3
            changed += 1
    assert changed == sum(
        1 for name, value in untouched.items() if not torch.equal(value, found.state_dict()[name])
    )
    with SafeWeights.open(base) as a, SafeWeights.open(tmp_path / "out") as b:
        assert a.files.keys() == b.files.keys() and list(a.entries()) == list(b.entries())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_one_rounding_and_the_rest_bit_for_bit(plain, dtype, tmp_path):
    _, weights, config = plain
    dtype = getattr(torch, dtype)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    base = {n: v if n == bias else v.to(dtype) for n, v in weights.items()}
    folder = shards_of(base, config, tmp_path / "base", 7)
    spec = spec_of(folder, AdapterConfig(rank=4, expert_layout="shared_outer"))
    tensors = random_adapter(spec)
    report = export_merged(spec, tensors, folder, tmp_path / "out")
    assert report.shards == -(-len(base) // 7)
    found, expected = read_all(tmp_path / "out"), expected_weights(spec, tensors, base)
    assert found.keys() == base.keys()
    for name, value in found.items():
        exact = expected.get(name.removesuffix(".weight"))
        if exact is None:
            assert torch.equal(value, base[name]), name
        else:
            step = torch.finfo(dtype).eps * exact.abs() * 0.5
            assert ((value.double() - exact).abs() <= step * 1.001 + 1e-6).all(), name
    assert (tmp_path / "out/config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_all_files_are_ones_own_to_read_and_write(sharded):
    folder, spec, tensors, out = sharded
    before = os.umask(0o027)
    try:
        export_merged(spec, tensors, folder, out)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o640}


EXPERT = "model.layers.1.mlp.experts.{}.gate_proj.weight"
WRONG = {
    "base tensor missing": (
        lambda base, tensors: base.pop(EXPERT.format(2)),
        "no weights for 1 adapted linears: .*experts.2.gate_proj.weight of layers.1.experts.gate",
    ),
    "unknown form": (
        lambda base, tensors: base.update(
            {EXPERT.format(2).replace("weight", "qweight"): base.pop(EXPERT.format(2))}
        ),
        "qweight, a form that is not known",
    ),
    "an expert more": (
        lambda base, tensors: base.update({EXPERT.format(4): base[EXPERT.format(3)].clone()}),
        "experts.4.gate_proj.weight, and the adapter has 4 experts",
    ),
    "another shape": (
        lambda base, tensors: base.update({EXPERT.format(0): torch.zeros(3, 3)}),
        r"is \[3, 3\], and the adapter's site layers.1.experts.gate takes \[64, 160\]",
    ),
    "B missing": (
        lambda base, tensors: tensors.pop("layers.0.o_proj.B"),
        "lacks layers.0.o_proj.B",
    ),
    "no site": (
        lambda base, tensors: tensors.update({"layers.9.o_proj.B": np.zeros((1, 1))}),
        "no site for layers.9.o_proj.B",
    ),
    "experts missing": (
        lambda base, tensors: tensors.update(
            {"layers.1.experts.up.A": tensors["layers.1.experts.up.A"][:3]}
        ),
        r"layers.1.experts.up.A is \[3, 3, 160\], and its site takes \[4, 3, 160\]",
    ),
    "NaN": (
        lambda base, tensors: tensors["layers.0.o_proj.A"].__setitem__((0, 0), np.nan),
        "layers.0.o_proj.A holds NaN",
    ),
    "infinity in the base": (
        lambda base, tensors: base[EXPERT.format(1)].__setitem__((0, 0), float("inf")),
        "experts.1.gate_proj.weight would hold NaN or infinity in rows 0 to",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused(plain, case, tmp_path):
    _, weights, config = plain
    change, message = WRONG[case]
    base = {name: value.clone() for name, value in weights.items()}
    spec = spec_of(plain[0])
    tensors = random_adapter(spec)
    change(base, tensors)
    folder = shards_of(base, config, tmp_path / "base", 1000)
    with pytest.raises((ExportError, AdapterError), match=message):
        export_merged(spec, tensors, folder, tmp_path / "out")
    assert not looks_whole(tmp_path / "out")


def test_float16_that_cannot_hold_a_sum_is_refused(sharded):
    base, spec, tensors, out = sharded
    tensors["layers.0.o_proj.A"] *= 1e7
    with pytest.raises(ExportError, match="float16 cannot hold the sum"):
        export_merged(spec, tensors, base, out, Form(dtype="float16"))


def test_all_but_weights_and_links_is_copied(plain, tmp_path):
    base, out = tmp_path / "base", tmp_path / "out"
    shutil.copytree(plain[0], base)
    spec = spec_of(base)
    export_merged(spec, random_adapter(spec), base, out)
    names = {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors"}
    assert {path.name for path in out.iterdir()} == names | {"merge.json"}
    (base / "chat_template.jinja").symlink_to("/etc/passwd")
    with pytest.raises(FileError, match="chat_template.jinja, a link to /etc/passwd outside"):
        export_merged(spec, random_adapter(spec), base, tmp_path / "other")
    assert not looks_whole(tmp_path / "other")


def test_a_damaged_base(sharded):
    base, spec, tensors, out = sharded
    path = base / "model-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FileError, match="model-1.safetensors has .* truncated"):
        export_merged(spec, tensors, base, out)
