"""`export` and `adapter` on the command line, from a run's checkpoint to directories and back."""

import json
import shutil

import hf
import numpy as np
import pytest
import tiny_families
from checkpoints import write_checkpoint
from published_configs import PUBLISHED, shrunk
from safetensors.numpy import save_file

from lora_moe_rl import cli
from lora_moe_rl.adapters import peft
from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.resize import resize
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import ExportError
from lora_moe_rl.export import merged
from lora_moe_rl.files import adapter_source as source
from lora_moe_rl.models.fingerprint import base_record
from lora_moe_rl.tiny.make import cached_at as tiny_at

CONFIG = shrunk(PUBLISHED["DeepSeek-V3"]) | {"num_hidden_layers": 2, "first_k_dense_replace": 1}


@pytest.fixture
def base(tmp_path):
    directory = tmp_path / "base"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    save_file({"x": np.arange(6, dtype=np.float32)}, directory / "model.safetensors")
    return directory


def save_run(folder, base, sizes=CONFIG, path=None, revision=None, **adapter):
    """A run whose checkpoint was written by two ranks that each hold half of every tensor. `path`:
    its model.path, if not the base's directory."""
    config = RunConfig(model=str(base), adapter=adapter)
    spec = AdapterSpec.build(ModelShape.from_hf_config(sizes), config.adapter)
    generator = np.random.default_rng(len(adapter))
    tensors, files = {}, ({}, {})
    for name, shape in spec.tensor_shapes.items():
        tensors[name] = generator.standard_normal(shape, dtype=np.float32)
        cut = shape[0] // 2
        zeros = ",".join("0" * (len(shape) - 1))
        files[0][f"adapter|{name}|0,{zeros}"] = tensors[name][:cut]
        files[1][f"adapter|{name}|{cut},{zeros}"] = tensors[name][cut:]
        files[1][f"exp_avg|{name}|{cut},{zeros}"] = tensors[name][cut:]
    metadata = {
        "step": 3,
        "adapter": config.adapter.model_dump(mode="json"),
        "base": base_record(path or str(base), base, revision),
    }
    with write_checkpoint(folder / "checkpoints", 3, 2, metadata) as directory:
        for rank, arrays in enumerate(files):
            arrays = {name: np.ascontiguousarray(value) for name, value in arrays.items()}
            save_file(arrays, directory / f"trainer_{rank:05d}.safetensors")
    return spec, tensors


@pytest.fixture
def run(tmp_path, base):
    return save_run(
        tmp_path / "run", base, rank=4, expert_rank=2, rank_pattern={"mlp.*": 5, "experts.*": 3}
    )


def deltas(spec, tensors):
    return {s.name: s.scale * (tensors[f"{s.name}.B"] @ tensors[f"{s.name}.A"]) for s in spec}


def check(directory, base, expected, scale=1.0):
    found = source.load(directory, base)
    got = deltas(found.spec, found.tensors)
    assert got.keys() == expected.keys()
    for name in got:
        limit = 1e-5 * np.abs(expected[name]).max()
        np.testing.assert_allclose(got[name], scale * expected[name], atol=limit)
    return found


def test_a_run_is_exported_in_every_form(run, base, tmp_path, capsys):
    expected = deltas(*run)
    for number, options in enumerate(((), ("--form", "3d"), ("--for", "vllm"))):
        out = tmp_path / f"out{number}"
        command = ["export", str(tmp_path / "run"), "--to", "peft", "--out", str(out), *options]
        assert cli.main(command) == 0
        found = check(out, None, expected)  # its config names the base
    settings = json.loads((out / "adapter_config.json").read_text())
    assert settings["r"] == 8 and not settings["rank_pattern"]
    assert {site.rank for site in found.spec} == {3, 4, 5}  # without what is zero in A and B
    assert f"--max-lora-rank 8 --lora-modules out2={out}" in capsys.readouterr().out
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000003"
    assert cli.main(["export", str(checkpoint), "--to", "peft", "--out", str(tmp_path / "c")]) == 0
    check(tmp_path / "c", base, expected)


def test_an_adapter_is_not_merged_twice_and_another_base_is_told(run, base, tmp_path, capsys):
    peft_, once = tmp_path / "peft", tmp_path / "once"
    assert cli.main(["export", str(tmp_path / "run"), "--to", "peft", "--out", str(peft_)]) == 0
    source.load(peft_, base)
    assert "was trained on" not in capsys.readouterr().err
    shutil.copytree(base, once)
    save_file({"x": np.ones(6, np.float32)}, once / "model.safetensors")
    source.load(peft_, once)
    said = " ".join(capsys.readouterr().err.split())
    assert f"was trained on {base}, and {once} has other weight files" in said
    digest = "a" * 32
    (once / "merge.json").write_text(json.dumps({"merged": {"adapter": digest}}))
    with pytest.raises(ExportError, match="has this adapter merged in already"):
        merged._check_not_merged(once, digest)
    merged._check_not_merged(once, "b" * 32)
    merged._check_not_merged(base, digest)


def test_the_bases_revision_goes_with_an_adapter(tmp_path, base, capsys, monkeypatch):
    save_run(tmp_path / "run", base, path="me/tiny", revision="v1", rank=4)
    asked = []

    def found(path, revision=None):
        asked.append((path, revision))
        return base

    monkeypatch.setattr("lora_moe_rl.files.adapter_source.find_local", found)
    monkeypatch.setattr("lora_moe_rl.models.directory.resolve_model", found)
    out = tmp_path / "out"
    assert cli.main(["export", str(tmp_path / "run"), "--to", "peft", "--out", str(out)]) == 0
    settings = json.loads((out / "adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["revision"]) == ("me/tiny", "v1")
    assert "--revision v1" in capsys.readouterr().out
    assert source.load(out).config.model.path == str(base) and asked == [("me/tiny", "v1")]
    merged = ["export", str(tmp_path / "run"), "--to", "merged", "--out", str(tmp_path / "merged")]
    cli.main(merged)
    assert asked[1] == ("me/tiny", "v1")


def test_the_directory_one_is_in_is_not_replaced(tmp_path, run, base, capsys, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    error = refused(capsys, "export", tmp_path / "run", "--to", "peft", "--out", ".")
    assert "--out . is the directory you are in; name a new one" in error
    assert not any((tmp_path / "here").iterdir())


def refused(capsys, *command):
    assert cli.main([str(word) for word in command]) != 0
    return " ".join(capsys.readouterr().err.split())


def test_what_export_refuses(run, base, tmp_path, capsys):
    folder, full = tmp_path / "run", tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").write_text("mine")
    to = ("--to", "peft", "--out")
    assert "is not empty" in refused(capsys, "export", folder, *to, full)
    assert "no run" in refused(capsys, "export", full, *to, tmp_path / "x")
    said = refused(capsys, "export", folder, *to, tmp_path / "x", "--base", "nope")
    assert "error: --base 'nope' is not a directory" in said
    said = refused(capsys, "export", folder, *to, full / "mine.txt/x")
    assert f"{full / 'mine.txt'} is no directory" in said
    assert "no effect" in refused(capsys, "export", folder, *to, "x", "--dtype", "float32")
    assert "--form has no effect" in refused(
        capsys, "export", folder, "--to", "merged", "--out", "x", "--form", "2d"
    )
    other = tmp_path / "other"
    shutil.copytree(base, other)
    save_file({"x": np.arange(1, 7, dtype=np.float32)}, other / "model.safetensors")
    for target in ("peft", "merged"):
        command = ("export", folder, "--to", target, "--out", tmp_path / "x", "--base", other)
        assert "weight files are others than when the run was made" in refused(capsys, *command)
    (other / "config.json").write_text(json.dumps(CONFIG | {"rms_norm_eps": 0.5}))
    assert "rms_norm_eps was None, is 0.5" in refused(capsys, *command)
    assert not (tmp_path / "x").exists()


def test_a_damaged_checkpoint_is_refused(run, tmp_path, capsys):
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000003"
    path = checkpoint / "trainer_00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    command = ("--to", "peft", "--out", tmp_path / "x")
    for origin in (checkpoint, tmp_path / "run"):
        assert "its SHA-256 differs" in refused(capsys, "export", origin, *command)


def test_inspect_shows_ranks_and_norms(run, tmp_path, capsys):
    folder = str(tmp_path / "run")
    assert cli.main(["adapter", "inspect", folder, "--json", "--png", str(tmp_path / "h.png")]) == 0
    report = json.loads(capsys.readouterr().out)
    for name, delta in deltas(*run).items():
        found = report["sites"][name]
        np.testing.assert_allclose(found["norm"], np.linalg.norm(delta), rtol=1e-5)
        if delta.ndim == 3:
            of_expert = np.linalg.norm(delta, axis=(1, 2))
            np.testing.assert_allclose(found["of_expert"], of_expert, rtol=1e-5)
    from matplotlib.image import imread

    picture = imread(tmp_path / "h.png")
    assert len(np.unique(picture.reshape(-1, picture.shape[-1]), axis=0)) > 30
    of_service = tmp_path / "a:train:0"  # as a service's models are called
    of_service.symlink_to(folder)
    assert cli.main(["adapter", "inspect", str(of_service)]) == 0
    out = capsys.readouterr().out
    assert "experts.down" in out and "kv_a_proj" in out
    assert f"{of_service}" in out


def test_import_says_the_settings_that_train_it(run, base, tmp_path, capsys):
    cli.main(
        [
            "export",
            str(tmp_path / "run"),
            "--to",
            "peft",
            "--form",
            "3d",
            "--out",
            str(tmp_path / "p"),
        ]
    )
    capsys.readouterr()
    assert cli.main(["adapter", "import", str(tmp_path / "p"), "--out", str(tmp_path / "i")]) == 0
    check(tmp_path / "i", base, deltas(*run))
    from lora_moe_rl.config.overrides import override

    words = [line.strip().replace("'", "") for line in capsys.readouterr().out.splitlines()[2:]]
    config = override(RunConfig(model=str(base)), words)
    spec = AdapterSpec.build(run[0].shape, config.adapter)
    assert [(s.name, s.rank) for s in spec] == [(s.name, s.rank) for s in run[0]]
    for site, wanted in zip(spec, source.load(tmp_path / "p", base).spec, strict=True):
        assert site.scale == pytest.approx(wanted.scale, rel=1e-5)


def test_a_tiny_base_is_named_by_its_directory(base, tmp_path, capsys, monkeypatch):
    """Its name means something to us alone: not to vLLM, nor to PEFT."""
    monkeypatch.setenv("LORA_MOE_RL_CACHE", str(tmp_path / "cache"))
    tiny = tiny_at("qwen3_moe")
    shutil.copytree(base, tiny)
    save_run(tmp_path / "run", tiny, path="qwen3_moe")
    out = tmp_path / "adapter"
    assert cli.main(["export", str(tmp_path / "run"), "--to", "peft", "--out", str(out)]) == 0
    printed = capsys.readouterr().out.splitlines()[-1]
    assert f" {tiny} " in printed and f"--lora-modules adapter={out}" in printed
    settings = json.loads((out / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(tiny)
    # One of before, and one from elsewhere: what is not here is still not fetched.
    for name, code in (("qwen3_moe", 0), ("deepseek_v3", 2), ("nobody/nothing", 2), ("../x", 2)):
        settings["base_model_name_or_path"] = name
        (out / "adapter_config.json").write_text(json.dumps(settings))
        target = tmp_path / name.replace("/", "-")
        assert cli.main(["adapter", "import", str(out), "--out", str(target)]) == code


def test_resize_and_combine(run, base, tmp_path, capsys):
    folder, expected = str(tmp_path / "run"), deltas(*run)
    command = ["adapter", "resize", folder, "--rank", "7", "--expert-rank", "9", "--out"]
    assert cli.main([*command, str(tmp_path / "grown")]) == 0
    assert "grown (exact)" in capsys.readouterr().out
    found = check(tmp_path / "grown", base, expected)
    assert {site.rank for site in found.spec} == {7, 9}

    assert cli.main(["adapter", "resize", folder, "--rank", "2", "--out", str(tmp_path / "s")]) == 0
    assert "rank 5 -> 2" in capsys.readouterr().out
    small = source.load(tmp_path / "s", base)
    lost = sum(
        np.square(d - e).sum()
        for d, e in zip(deltas(small.spec, small.tensors).values(), expected.values())
    )
    assert 0 < lost < sum(np.square(e).sum() for e in expected.values())

    parts = [f"{folder}:0.5", f"{tmp_path / 'grown'}:1.5"]
    assert cli.main(["adapter", "combine", *parts, "--out", str(tmp_path / "sum")]) == 0
    check(tmp_path / "sum", base, expected, 2.0)
    capsys.readouterr()
    command = ("adapter", "combine", *parts, "--out", tmp_path / "sum5", "--rank", 5)
    assert cli.main([str(word) for word in command]) == 0
    check(tmp_path / "sum5", base, expected, 2.0)
    for command, said in (
        (("combine", f"{folder}:1e300"), "B times 1e+300 is too large for float32"),
        (("combine", f"{folder}:nan"), "the weight nan is not finite"),
        (("resize", folder, "--rank", 513), "--rank 513 is no rank; use 1 to 512"),
        (("inspect", folder, "--png", tmp_path), "is a directory; name a file in it"),
    ):
        out = () if command[0] == "inspect" else ("--out", tmp_path / "refused")
        assert said in refused(capsys, "adapter", *command, *out)
    assert not (tmp_path / "refused").exists() and not tmp_path.with_suffix(".png").exists()


def test_a_rank_and_a_form_of_experts_that_are_not_there_are_refused(tmp_path, base, capsys):
    save_run(tmp_path / "run", base, rank=4, targets=("o_proj", "mlp.*"))
    ranks = ("--rank", 3, "--expert-rank", 1, "--out", tmp_path / "x")
    for what in ("resize", "combine"):
        said = refused(capsys, "adapter", what, tmp_path / "run", *ranks)
        assert "--expert-rank 1 has no effect: there are no routed experts" in said
    form = ("--form", "3d", "--out", tmp_path / "x")
    for command in (("export", tmp_path / "run", "--to", "peft"),
                    ("adapter", "import", tmp_path / "run"),
                    ("adapter", "resize", tmp_path / "run", "--rank", 3)):  # fmt: skip
        said = refused(capsys, *command, *form)
        assert "--form 3d has no effect: there are no routed experts" in said
    assert not (tmp_path / "x").exists()


def test_a_name_that_ends_in_a_number_is_no_weight(tmp_path, run, base, capsys, monkeypatch):
    """`ad:2` is the directory of that name where there is one."""
    monkeypatch.chdir(tmp_path)
    shutil.move("run", "ad:2")
    combine = ["adapter", "combine", "--base", str(base), "--out"]
    assert cli.main([*combine, "sum", "ad:2"]) == 0
    check(tmp_path / "sum", base, deltas(*run))
    shutil.copytree("ad:2", "ad")
    said = refused(capsys, *combine, "x", "ad:2")
    assert "ad:2 is there, and so is ad: write ad:2:1 for the first, ad/:2 for 2 times" in said
    for number, (part, weight) in enumerate((("ad:2:1", 1.0), ("ad/:2", 2.0), ("ad:2.0", 2.0))):
        assert cli.main([*combine, f"out{number}", part]) == 0
        check(tmp_path / f"out{number}", base, deltas(*run), weight)


def test_adapters_of_other_bases_have_no_sum(run, base, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(base, other)
    save_file({"x": np.arange(1, 7, dtype=np.float32)}, other / "model.safetensors")
    save_run(tmp_path / "run2", other, rank=4)
    parts = (tmp_path / "run", tmp_path / "run2", "--out", tmp_path / "x")
    assert "of several bases have no sum" in refused(capsys, "adapter", "combine", *parts)
    weight = (f"{tmp_path / 'run'}:nan", "--out", tmp_path / "x")
    assert "not finite" in refused(capsys, "adapter", "combine", *weight)


def test_what_vllm_cannot_serve_is_refused_for_it(run):
    spec, tensors, _ = resize(*run, lambda site: 513)
    with pytest.raises(ValueError, match="rank 513 is above 512"):
        peft.for_vllm(spec, tensors)
    adapter = RunConfig(adapter={"targets": ("kv_b_proj",)}).adapter
    spec = AdapterSpec.build(run[0].shape, adapter, servable=False)
    with pytest.raises(ValueError, match="kv_b_proj: vLLM absorbs it"):
        peft.for_vllm(spec, {})


def test_a_run_is_merged_into_a_real_model(tmp_path, capsys):
    tiny_families.save("moonlight", tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    spec, tensors = save_run(tmp_path / "run", tmp_path / "base", config, rank=3, alpha=1)
    command = ["export", str(tmp_path / "run"), "--to", "merged", "--out", str(tmp_path / "m")]
    assert cli.main(command) == 0
    assert "tensors changed" in capsys.readouterr().out
    ids = [5, 9, 77, 3, 20, 21]
    before = hf.logprobs(hf.load(tmp_path / "base"), ids)
    hf.merge(model := hf.load(tmp_path / "base"), spec, tensors)
    expected, got = hf.logprobs(model, ids), hf.logprobs(hf.load(tmp_path / "m"), ids)
    np.testing.assert_allclose(got, expected, rtol=0, atol=5e-6)
    assert np.abs(got - before).max() > 0.1
