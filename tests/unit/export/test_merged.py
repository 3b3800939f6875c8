"""Merged checkpoints: every family and form of the base, and what may go wrong on the way."""

from __future__ import annotations

import contextlib
import json
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny_families
import torch
from safetensors.torch import load_file, save_file

from lora_moe_rl.adapters.families import ModelShape, hf_path
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import AdapterConfig
from lora_moe_rl.errors import AdapterError, ConfigError, ExportError, FileError
from lora_moe_rl.export import merged, merged_plan
from lora_moe_rl.export.merged import export_merged
from lora_moe_rl.export.merged_weights import Form
from lora_moe_rl.files.untrusted import SafeWeights
from lora_moe_rl.kernels.merge import formats
from lora_moe_rl.kernels.merge.rounding import Arrived
from lora_moe_rl.verify import hf

ADAPTER = AdapterConfig(rank=4, expert_rank=3, alpha=5.0, expert_alpha=2.0)
INDEX = "model.safetensors.index.json"


def spec_of(base: Path, adapter: AdapterConfig = ADAPTER) -> AdapterSpec:
    shape = ModelShape.from_hf_config(json.loads((base / "config.json").read_text()))
    if not shape.num_experts:
        adapter = AdapterConfig(rank=adapter.rank, alpha=adapter.alpha)
    return AdapterSpec.build(shape, adapter)


def random_adapter(spec: AdapterSpec, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: (0.1 * rng.standard_normal(shape)).astype(np.float32)
        for name, shape in spec.tensor_shapes.items()
    }


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    with SafeWeights.open(folder) as weights:
        return {name: weights.read(name) for name in weights.file_of}


def shards_of(base: dict[str, torch.Tensor], config: dict, folder: Path, sizes: int) -> Path:
    """A directory with an index, `sizes` tensors in a shard."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = list(base)
    weight_map = {}
    for number, first in enumerate(range(0, len(names), sizes)):
        some, file = names[first : first + sizes], f"model-{number}.safetensors"
        save_file({name: base[name].contiguous() for name in some}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(some, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def expected_weights(spec, tensors, base: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`{path: W + scale * B A}` in float64 of every adapted linear; `base` per expert, by path."""
    result = {}
    for site in spec:
        path = f"model.layers.{site.layer}.{hf_path(spec.shape, site.module)}"
        A, B = (torch.from_numpy(tensors[f"{site.name}.{m}"]).double() for m in "AB")
        for expert in range(site.num_experts or 1):
            of_expert = [
                x if site.num_experts is None or site.shared == m else x[expert]
                for m, x in (("A", A), ("B", B))
            ]
            name = path.format(expert)
            delta = site.scale * (of_expert[1] @ of_expert[0])
            result[name] = base[f"{name}.weight"].double() + delta
    return result


@pytest.mark.parametrize("layout", ["per expert", "stacked"])
@pytest.mark.parametrize("family", tiny_families.FAMILIES)
def test_merged_equals_weights_merged_by_hand(family, layout, tmp_path):
    if (family, layout) == ("qwen3", "stacked"):
        pytest.skip("a dense model has no experts to stack")
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
    report = export_merged(spec, tensors, base, tmp_path / "out")
    assert report.bytes_read == report.bytes_written
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


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """(directory, its tensors per expert, its config) of a small DeepSeek-V3 in float32."""
    folder = tmp_path_factory.mktemp("plain") / "base"
    sizes = {
        "q_lora_rank": 64,
        "hidden_size": 160,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "n_group": 2,
    }
    tiny_families.save("deepseek_v3", folder, intermediate_size=192, **sizes)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_text("never copied")
    return folder, load_file(folder / "model.safetensors"), json.loads(
        (folder / "config.json").read_text()
    )  # fmt: skip


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    """Several steps a matrix, as large weights have."""
    monkeypatch.setattr(merged_plan, "STEP_NUMBERS", 160 * 50)
    monkeypatch.setattr(merged_plan, "COPY_BYTES", 10_000)


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


def quantise(weights: dict[str, torch.Tensor], form: str) -> dict[str, torch.Tensor]:
    """Linears of layers and experts as `form`; what is left becomes bfloat16."""
    result = {}
    for name, value in weights.items():
        path, _, last = name.rpartition(".")
        linear = value.dim() == 2 and "_proj" in name
        if not linear or last != "weight":
            keep = name.endswith("e_score_correction_bias")
            result[name] = value if keep else value.to(torch.bfloat16)
        elif form == "fp8":
            result[name], result[f"{path}.weight_scale_inv"] = formats.quantise_fp8(value)
        else:
            packed, scale = formats.quantise_int4(value, torch.bfloat16)
            result[f"{path}.weight_packed"], result[f"{path}.weight_scale"] = packed, scale
            result[f"{path}.weight_shape"] = torch.tensor(value.shape)
    return result


def dequantise(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    result = {}
    for name, value in tensors.items():
        path = name.rpartition(".")[0]
        if f"{path}.weight_scale_inv" in tensors and name.endswith(".weight"):
            scale = tensors[f"{path}.weight_scale_inv"]
            result[name] = formats.dequantise_fp8(value, scale, torch.float64)
        elif name.endswith("weight_packed"):
            scale = tensors[f"{path}.weight_scale"]
            result[f"{path}.weight"] = formats.dequantise_int4(value, scale, torch.float64)
        elif not name.endswith(("weight_scale_inv", "weight_scale", "weight_shape")):
            result[name] = value
    return result


WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 32}
CONFIGS = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": WEIGHTS}},
    },
}
# A step of the form, over the largest element of its block.
STEPS = {"fp8": 2**-4, "int4": 1 / 15 + 2**-8}  # and the rounding of a bfloat16 scale
DENSE = AdapterConfig(rank=4, targets=("q_b_proj", "mlp.*", "experts.gate", "shared_expert.down"))


def check_told(told: Arrived, before, expected, found) -> None:
    """What is said of a tensor, against its float64 values."""
    error, change, got = found - expected, expected - before, found - before
    assert told.relative == pytest.approx(float(error.norm() / expected.norm()), rel=1e-3)
    assert told.error_over_change == pytest.approx(float(error.norm() / change.norm()), rel=1e-3)
    product = float((got * change).sum())
    assert told.cosine == pytest.approx(product / float(got.norm() * change.norm()), abs=1e-3)
    assert told.lost == pytest.approx(abs(1 - product / float(change.square().sum())), abs=1e-3)


@pytest.mark.parametrize("per_shard", [3, 1000], ids=["scales in other shards", "one shard"])
@pytest.mark.parametrize("form", CONFIGS)
def test_a_quantised_base_stays_quantised(plain, form, per_shard, tmp_path):
    _, weights, config = plain
    base = quantise(weights, form)
    config = config | {"quantization_config": CONFIGS[form]}
    folder = shards_of(base, config, tmp_path / "base", per_shard)
    spec = spec_of(folder, DENSE)
    tensors = random_adapter(spec)
    report = export_merged(spec, tensors, folder, tmp_path / "out")
    found, plain_base = read_all(tmp_path / "out"), dequantise(base)
    exact = expected_weights(spec, tensors, plain_base)
    assert {n: v.dtype for n, v in found.items()} == {n: v.dtype for n, v in base.items()}
    values = dequantise(found)
    for name in base:
        if name.rpartition(".")[0] not in exact:
            assert torch.equal(found[name].view(torch.uint8), base[name].view(torch.uint8)), name
    for path, expected in exact.items():
        error = values[f"{path}.weight"] - expected
        assert error.abs().max() <= STEPS[form] * expected.abs().max(), path
        check_told(
            report.arrived[f"{path}.weight"],
            *(plain_base[f"{path}.weight"], expected, values[f"{path}.weight"]),
        )
    assert report.arrived.keys() == {f"{path}.weight" for path in exact}
    written = json.loads((tmp_path / "out/merge.json").read_text())["rounding"]
    assert written.keys() == report.arrived.keys() | {"all"}


@pytest.mark.parametrize("form", [*CONFIGS, "float"])
def test_another_dtype(plain, form, tmp_path):
    _, weights, config = plain
    base = weights if form == "float" else quantise(weights, form)
    if form != "float":
        config = config | {"quantization_config": CONFIGS[form], "torch_dtype": "bfloat16"}
    folder = shards_of(base, config, tmp_path / "base", 5)
    spec = spec_of(folder, DENSE)
    tensors = random_adapter(spec)
    export_merged(spec, tensors, folder, tmp_path / "out", Form(dtype="float16"))
    found, plain_base = read_all(tmp_path / "out"), dequantise(base)
    exact = expected_weights(spec, tensors, plain_base)
    assert found.keys() == plain_base.keys()
    for name, value in found.items():
        expected = exact.get(name.removesuffix(".weight"), plain_base[name].double())
        kept = form != "float" and name.endswith("e_score_correction_bias")
        assert value.dtype == (torch.float32 if kept else torch.float16), name
        torch.testing.assert_close(value.double(), expected, rtol=6e-4, atol=1e-6)
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert "quantization_config" not in written
    assert "float16" in (written.get("dtype"), written.get("torch_dtype"))
    files = json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"]
    assert files.keys() == found.keys()


@pytest.fixture
def sharded(plain, tmp_path):
    """(base of several shards, spec, adapter, out)."""
    _, weights, config = plain
    folder = shards_of(weights, config, tmp_path / "base", 9)
    spec = spec_of(folder)
    return folder, spec, random_adapter(spec), tmp_path / "out"


def looks_whole(folder: Path) -> bool:
    return (folder / "config.json").exists() or (folder / INDEX).exists()


def interrupt(monkeypatch, after: int) -> None:
    original, count = merged._pwrite, iter(range(10**9))

    def write(*args):
        if next(count) == after:
            raise KeyboardInterrupt
        original(*args)

    monkeypatch.setattr(merged, "_pwrite", write)


def test_an_interrupted_merge_goes_on(sharded, monkeypatch):
    base, spec, tensors, out = sharded
    with monkeypatch.context() as patch:
        interrupt(patch, after=150)
        with pytest.raises(KeyboardInterrupt):
            export_merged(spec, tensors, base, out)
    finished = sorted(path.name for path in out.glob("*.safetensors"))
    assert finished and not looks_whole(out) and not list(out.glob("*.partial"))
    times = {name: (out / name).stat().st_mtime_ns for name in finished}
    damaged = finished[0]  # bits that flipped meanwhile
    data = bytearray((out / damaged).read_bytes())
    data[-1] ^= 1
    (out / damaged).write_bytes(data)
    (out / "model-99.safetensors.partial").write_text("left over")

    report = export_merged(spec, tensors, base, out)

    assert report.kept_shards == len(finished) - 1
    for name in finished[1:]:
        assert (out / name).stat().st_mtime_ns == times[name]
    export_merged(spec, tensors, base, other := out.with_name("other"))
    assert sorted(p.name for p in out.iterdir()) == sorted(p.name for p in other.iterdir())
    for path in other.iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name


def test_an_unfinished_merge_of_something_else_is_in_the_way(sharded, monkeypatch):
    base, spec, tensors, out = sharded
    with monkeypatch.context() as patch:
        interrupt(patch, after=150)
        with pytest.raises(KeyboardInterrupt):
            export_merged(spec, tensors, base, out)
    with pytest.raises(ExportError, match="unfinished merge of another adapter"):
        export_merged(spec, random_adapter(spec, seed=1), base, out)
    with pytest.raises(ExportError, match="unfinished merge of another form"):
        export_merged(spec, tensors, base, out, Form(dtype="float16"))
    (base / "config.json").touch()
    (base / "model-0.safetensors").touch()
    with pytest.raises(ExportError, match="unfinished merge of another base"):
        export_merged(spec, tensors, base, out)


def test_a_full_directory_is_not_written_to(sharded):
    base, spec, tensors, out = sharded
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ExportError, match="out is not empty .it holds notes.txt"):
        export_merged(spec, tensors, base, out)
    with pytest.raises(ExportError, match="base is not empty"):
        export_merged(spec, tensors, base, base)
    assert [path.name for path in out.iterdir()] == ["notes.txt"]


def test_a_disk_without_room_is_told_before_anything_is_written(sharded, monkeypatch):
    base, spec, tensors, out = sharded
    usage = shutil.disk_usage(base)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ExportError, match="GB more, and its disk has 0.0 GB free"):
        export_merged(spec, tensors, base, out)
    assert not list(out.glob("*.safetensors"))


@contextlib.contextmanager
def largest_file(nbytes: int):
    """A disk that refuses at this size of a file, as a full one does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_refuses_in_the_middle_leaves_nothing_that_looks_whole(sharded):
    base, spec, tensors, out = sharded
    sizes = sorted(path.stat().st_size for path in base.glob("*.safetensors"))
    with (
        largest_file(sizes[-1] - 1000),
        pytest.raises(ExportError, match="File too large. It is not a whole checkpoint"),
    ):
        export_merged(spec, tensors, base, out)
    assert not looks_whole(out) and not list(out.glob("*.partial"))
    report = export_merged(spec, tensors, base, out)
    assert report.shards == len(sizes) and looks_whole(out)


def test_a_disk_that_refuses_the_last_files_leaves_nothing_that_looks_whole(sharded):
    base, spec, tensors, out = sharded
    large = max(path.stat().st_size for path in base.glob("*.safetensors")) + 1000
    with open(base / "tokenizer.json", "wb") as file:
        file.truncate(large + 1)
    with largest_file(large), pytest.raises(ExportError, match="tokenizer|File too large"):
        export_merged(spec, tensors, base, out)
    assert not looks_whole(out) and not list(out.glob("*.partial"))
    assert export_merged(spec, tensors, base, out).kept_shards > 1


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


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("fp8", {"weight_block_size": [64, 64]}, r"weight_block_size=\[64, 64\]; known is"),
        ("fp8", {"scale_fmt": "ue8m0"}, "scale_fmt='ue8m0', which a merge does not write; write"),
        ("int4", {"format": "marlin"}, "format='marlin'"),
        ("int4", {"config_groups": {"g": {"weights": WEIGHTS | {"group_size": 128}}}}, "128"),
    ],
)
def test_other_quantisations_are_refused(plain, form, change, message, tmp_path):
    _, weights, config = plain
    config = config | {"quantization_config": CONFIGS[form] | change}
    folder = shards_of(quantise(weights, form), config, tmp_path / "base", 1000)
    spec = spec_of(folder, DENSE)
    with pytest.raises(ExportError, match=message):
        export_merged(spec, random_adapter(spec), folder, tmp_path / "out")


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


def change_of(spec: AdapterSpec, ratio: float) -> dict[str, np.ndarray]:
    """An adapter whose change is about `ratio` times the weights of `plain`, which are of 0.1."""
    rng = np.random.default_rng(3)
    tensors = {}
    for site in spec:
        size = {"A": 1.0, "B": 0.1 * ratio / (site.scale * site.rank**0.5)}
        for matrix, shape in (("A", site.shape_A), ("B", site.shape_B)):
            tensors[f"{site.name}.{matrix}"] = (size[matrix] * rng.standard_normal(shape)).astype(
                np.float32
            )
    return tensors


@pytest.fixture(scope="module")
def half(plain, tmp_path_factory):
    """(a bfloat16 base of several shards, its tensors, its spec)."""
    _, weights, config = plain
    base = {name: value.bfloat16() for name, value in weights.items()}
    folder = shards_of(base, config, tmp_path_factory.mktemp("half") / "base", 9)
    return folder, base, spec_of(folder)


def test_what_bfloat16_loses_is_told(half, tmp_path):
    folder, base, spec = half
    tensors = change_of(spec, 1e-3)
    report = export_merged(spec, tensors, folder, tmp_path / "out")
    found, expected = read_all(tmp_path / "out"), expected_weights(spec, tensors, base)
    assert report.arrived.keys() == {f"{path}.weight" for path in expected}
    for path, value in expected.items():
        name = f"{path}.weight"
        check_told(report.arrived[name], base[name].double(), value, found[name].double())
    assert 0.3 < report.total.lost < 0.6 and 0.5 < report.total.cosine < 0.8
    written = json.loads((tmp_path / "out/merge.json").read_text())["rounding"]["all"]
    assert written["lost"] == report.total.lost and written["cosine"] == report.total.cosine


def test_stochastic_rounding_loses_nothing_in_the_mean_and_repeats_itself(
    half, tmp_path, monkeypatch
):
    folder, _, spec = half
    tensors = change_of(spec, 1e-3)
    written = {}
    for name, seed in (("one", 0), ("again", 0), ("other", 1)):
        form = Form(rounding="stochastic", seed=seed)
        report = export_merged(spec, tensors, folder, tmp_path / name, form)
        assert report.total.lost < 0.03  # of 200,000 elements
        written[name] = read_all(tmp_path / name)
    monkeypatch.setattr(merged_plan, "STEP_NUMBERS", 10**9)  # a whole matrix a step
    export_merged(spec, tensors, folder, tmp_path / "whole", Form(None, False, "stochastic"))
    written["whole"] = read_all(tmp_path / "whole")
    for name, value in written["one"].items():
        assert torch.equal(written["again"][name], value), name
        assert torch.equal(written["whole"][name], value), name
    assert any(not torch.equal(written["other"][n], v) for n, v in written["one"].items())


def test_what_is_adapted_in_float32_loses_nothing(half, tmp_path):
    folder, base, spec = half
    tensors = change_of(spec, 2e-5)
    report = export_merged(spec, tensors, folder, tmp_path / "out", Form(adapted_float32=True))
    assert report.total.lost < 1e-3 and report.total.cosine > 0.999
    found, expected = read_all(tmp_path / "out"), expected_weights(spec, tensors, base)
    for name, value in found.items():
        exact = expected.get(name.removesuffix(".weight"))
        if exact is None:
            assert torch.equal(value, base[name]), name
        else:
            assert value.dtype == torch.float32
            torch.testing.assert_close(value.double(), exact, rtol=1e-6, atol=1e-9)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert "float32" in (config.get("dtype"), config.get("torch_dtype"))
    loaded = hf.load(tmp_path / "out").state_dict()["model.layers.0.self_attn.o_proj.weight"]
    assert torch.equal(loaded, found["model.layers.0.self_attn.o_proj.weight"])


def test_a_merge_that_loses_too_much_does_not_load_and_goes_on_with_another_bound(half, tmp_path):
    folder, _, spec = half
    tensors, out = change_of(spec, 2e-5), tmp_path / "out"
    with pytest.raises(ExportError, match=r"out is not finished: 9\d.\d% of the change lost"):
        export_merged(spec, tensors, folder, out, stop_lost=0.9)
    assert not looks_whole(out)
    report = export_merged(spec, tensors, folder, out, stop_lost=0.99)
    assert report.kept_shards == report.shards and looks_whole(out)
    assert 0.9 < report.total.lost < 0.99


def test_a_form_that_does_not_fit_the_base_is_refused(plain, tmp_path):
    folder, weights, config = plain
    spec = spec_of(folder)
    with pytest.raises(ConfigError, match="--rounding stochastic has no effect"):
        export_merged(spec, random_adapter(spec), folder, tmp_path / "out", STOCHASTIC)
    config = config | {"quantization_config": CONFIGS["fp8"]}
    quantised = shards_of(quantise(weights, "fp8"), config, tmp_path / "base", 1000)
    spec = spec_of(quantised, DENSE)
    for form, message in (
        (STOCHASTIC, "--rounding stochastic has no effect"),
        (Form(adapted_float32=True), "weight is quantised, .*another form with --dtype"),
    ):
        with pytest.raises((ConfigError, ExportError), match=message):
            export_merged(spec, random_adapter(spec), quantised, tmp_path / "out", form)
    form = Form("bfloat16", rounding="stochastic")
    assert export_merged(spec, random_adapter(spec), quantised, tmp_path / "out", form).arrived


STOCHASTIC = Form(rounding="stochastic")
