"""The trainer on a quantised base: the numbers of the dequantised one, from packed bytes alone."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from quantised import edit, make_pair
from ranks import random_adapter, random_batch, run_ranks, spec_of
from safetensors.torch import load_file, save_file

from lora_moe_rl import cli
from lora_moe_rl.adapters.shards import assemble
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import LoraMoeRlError
from lora_moe_rl.files.untrusted import SafeWeights
from lora_moe_rl.kernels.dequant import Form

LAYOUTS = {
    "tp1": {},
    "recompute": {"recompute": "full"},
    "ep2": {"world_size": 2, "ep": 2},
    "cp2ep2": {"world_size": 2, "cp": 2, "ep": 2},
    "tp2ep2": {"world_size": 2, "tp": 2, "ep": 2},
    "etp2": {"world_size": 2, "tp": 2, "etp": 2},
    "pp2": {"world_size": 2, "pp": 2},
    "pp2vpp2": {"world_size": 2, "pp": 2, "vpp": 2},
}
SCALE = "_scale_inv"
CASES = [
    *(("int4", "qwen3_moe", layout) for layout in ("tp1", "recompute", "ep2", "etp2")),
    ("fp8", "deepseek_v3", "tp1"),
    ("int4", "qwen3_moe", "pp2vpp2"),
    ("mxfp4", "qwen3_moe", "etp2"),
    ("int4", "qwen3_moe", "cp2ep2"),
    *(
        pytest.param(*case.split(), marks=pytest.mark.slow)
        for case in (
            "int4 qwen3_moe tp2ep2", "int4 deepseek_v3 tp1", "int4 deepseek_v3 pp2",
            "fp8 qwen3_moe tp1", "fp8 qwen3_moe ep2", "fp8 deepseek_v3 tp2ep2",
            "fp8 deepseek_v3 cp2ep2",
            "mxfp4 deepseek_v3 tp2ep2",
        )
    ),
]  # fmt: skip


@cache
def pair(name: str, form: Form = "int4") -> tuple[Path, Path]:
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    return make_pair(name, folder, form)


@cache
def of_plain(name: str, form: Form, layout: str = "tp1"):
    return of(pair(name, form)[1], **LAYOUTS[layout])


def numbers(worker, spec):
    """Logprobs, gradients, and what is held."""
    from lora_moe_rl.kernels.packed_linear import SCRATCH
    from lora_moe_rl.trainer import packed_experts

    worker.set_adapter(random_adapter(spec))
    batch, table = random_batch(spec)
    loss, _, shards = worker.gradients(batch, table)
    scored = worker.score([ids.tolist() for ids in batch.token_ids], table, True)
    linears = [linear for *_, linear in packed_experts._linears(worker.engine.chunks)]
    return {
        "loss": loss,
        "shards": shards,
        "scored": scored,
        "held": packed_experts.held(worker.engine.chunks),
        "linears": len(linears),
        "scratch": len(SCRATCH.buffers),
    }


def config_of(folder, **trainer) -> RunConfig:
    return RunConfig(model=str(folder), trainer={"micro_batch_tokens": 60, **trainer})


def of(folder, **trainer):
    results = run_ranks(config_of(folder, **trainer), folder, numbers)
    shards = [shard for result in results for shard in result["shards"] or ()]
    scored = next(r["scored"] for r in results if r["scored"] is not None)
    gradients = assemble(spec_of(folder, config_of(folder)).tensor_shapes, shards)
    return gradients, np.concatenate(scored), results


def difference(a, b) -> float:
    return max(float(np.abs(a[name] - b[name]).max()) for name in b) / max(
        float(np.abs(value).max()) for value in b.values()
    )


@pytest.mark.parametrize(("form", "name", "layout"), CASES)
def test_the_numbers_are_those_of_the_dequantised_model(form, name, layout):
    gradients, scored, results = of(pair(name, form)[0], **LAYOUTS[layout])
    expected, plain_scored, plain_results = of_plain(name, form, layout)
    assert sum(r["linears"] for r in results) and not plain_results[0]["linears"]
    assert np.abs(scored - plain_scored).max() < 1e-6
    assert difference(gradients, expected) < 1e-6
    one_rank, one_rank_scored, _ = of_plain(name, form)  # whose sums are not over ranks
    assert np.abs(scored - one_rank_scored).max() < (5e-6 if "2" in layout else 1e-6)
    assert difference(gradients, one_rank) < (2e-6 if "2" in layout else 1e-6)


def test_in_bfloat16_to_the_bit():
    """Weights are rounded once, whoever dequantises them."""
    packed, plain = (of(folder, dtype="bfloat16") for folder in pair("qwen3_moe"))
    assert np.array_equal(packed[1], plain[1])
    assert all(np.array_equal(packed[0][name], plain[0][name]) for name in plain[0])


def test_what_is_held_is_what_the_checkpoint_has():
    packed, _ = pair("qwen3_moe")
    whole = run_ranks(config_of(packed), packed, numbers)[0]["held"]
    with SafeWeights.open(packed) as weights:
        stored = [e for e in weights.entries() if ".experts." in e.name]
    held = sum(e.nbytes for e in stored if not e.name.endswith("weight_shape"))
    assert whole["packed"] == held
    parts = [r["held"] for r in of(packed, **LAYOUTS["ep2"])[2]]
    assert [part["packed"] for part in parts] == [held // 2, held // 2]
    # One layer's gate and up, and one layer's down, whatever the number of layers.
    assert whole["scratch"] == 4 * 8 * (2 * 192 * 96 + 96 * 192)


@pytest.mark.parametrize(("name", "numbers_of"), [("deepseek_v3", ()), ("qwen3_moe", "qkv")])
def test_dense_linears_stay_packed_where_rows_are_the_checkpoints(name, numbers_of):
    packed, _ = pair(name, "fp8")
    left = tuple(f".{letter}_proj.weight{end}" for letter in numbers_of for end in ("", SCALE))
    with SafeWeights.open(packed) as weights:
        scaled = {n.removesuffix(SCALE) for n in weights.file_of if n.endswith(SCALE)}
        names = [n for n in {*scaled, *(n + SCALE for n in scaled)} if not n.endswith(left)]
        stored = sum(weights.entry(n).nbytes for n in names)
    assert run_ranks(config_of(packed), packed, numbers)[0]["held"]["packed"] == stored


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"weight_scale": lambda t: t.fill_(float("nan"))}, "no finite numbers"),
        ({"weight_scale": lambda t: t * (t != t[1, 1])}, "not above zero"),
        ({"weight_shape": lambda t: t + 32}, "has the shape"),
        (
            {"weight_packed": lambda t: t[:, :4].contiguous()},
            r"is \[192, 4\], and config.json makes",
        ),
    ],
)
def test_what_is_wrong_is_named(change, named, tmp_path):
    path = "model.layers.1.mlp.experts.3.up_proj"
    broken = tmp_path / "broken"
    shutil.copytree(pair("qwen3_moe")[0], broken)
    edit(broken, **{f"{path}.{name}": how for name, how in change.items()})
    with pytest.raises(LoraMoeRlError, match=named) as raised:
        run_ranks(config_of(broken), broken, numbers)
    assert path in str(raised.value)


def test_an_expert_of_numbers_among_packed_ones_is_named(tmp_path):
    path = "model.layers.1.mlp.experts.3.up_proj"
    shutil.copytree(pair("qwen3_moe")[0], broken := tmp_path / "broken")
    held = load_file(broken / "model.safetensors")
    size = held.pop(f"{path}.weight_shape").tolist()
    for name in ("weight_packed", "weight_scale"):
        held.pop(f"{path}.{name}")
    held[f"{path}.weight"] = torch.zeros(size, dtype=torch.bfloat16)
    save_file(held, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LoraMoeRlError, match=rf"have no place .*\({path}.weight\)"):
        run_ranks(config_of(broken), broken, numbers)


def test_experts_are_cut_into_whole_groups():
    packed, _ = pair("deepseek_v3")  # experts of the width 96
    with pytest.raises(LoraMoeRlError, match="groups of 32 when trainer.etp=2 cuts them"):
        of(packed, **LAYOUTS["etp2"])


@pytest.mark.slow
def test_verify_layout_passes(capsys):
    """Against Hugging Face's model, dequantised; checkpoints of each layout read by the others."""
    packed, _ = pair("qwen3_moe")
    arguments = ["--model", str(packed), "--layouts", "tp2,ep2", "--json", "adapter.rank=4"]
    assert cli.main(["verify", "layout", *arguments]) == 0, capsys.readouterr().out


@pytest.mark.slow
def test_bench_dequant_compares_before_it_reports(capsys):
    sizes = ("--layers", "2", "--hidden", "64", "--experts", "4", "--width", "32")
    assert cli.main(["bench", "dequant", *sizes, "--tokens", "256", "--json"]) in (0, 1)
    result = json.loads(capsys.readouterr().out)  # 1: this machine is busy, or slow
    packed, plain = result["int4"], result["float32"]
    assert packed["experts"] < 1.1 * packed["stored"] < 0.2 * plain["experts"]
    assert packed["rest"] == plain["rest"] and plain["scratch"] == 0 < packed["scratch"]
    assert plain["logprobs_off"] <= 1e-6 and plain["gradients_off"] <= 1e-6
