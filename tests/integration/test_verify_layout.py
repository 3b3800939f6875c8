"""`lora-moe-rl verify layout` on real ranks: right layouts pass, and every fault is named."""

from __future__ import annotations

import dataclasses
import json

import pytest
import tiny_families
from quantised import make_pair
from ranks import run_ranks

from lora_moe_rl import cli
from lora_moe_rl.adapters import sharding
from lora_moe_rl.verify import jobs
from lora_moe_rl.verify.compare import TOLERANCES, gradient_errors, tensor_check
from lora_moe_rl.verify.inputs import random_adapter, random_batch
from lora_moe_rl.verify.layout import DEFAULT_LAYOUTS, make_config, plan
from lora_moe_rl.verify.layout_report import Report, Row

TOLERANCE = TOLERANCES["cpu", "float32"]["gradients"]


def verify(capsys, model, *arguments) -> tuple[int, dict]:
    """Exit code, and what --json says."""
    code = cli.main(["verify", "layout", "--model", str(model), "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def check_passes(capsys, model, layouts: str, *settings: str) -> None:
    code, report = verify(capsys, model, "--layouts", layouts, *settings)
    assert code == 0 and report["passed"], json.dumps(report, indent=1)
    reference, *rows = report["rows"]
    assert reference["name"] == "Hugging Face" and reference["checks"]["logprobs"]["error"] > 0
    assert [row["name"] for row in rows] == layouts.split(",")
    for row in rows:
        assert row["failure"] is None and len(row["checks"]) == 7
        assert row["checks"]["checkpoint"]["error"] == 0


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """6 experts top-3, 2 key/value heads, 131 tokens, a dense layer between two MoE layers."""
    folder = tmp_path_factory.mktemp("qwen3_moe")
    tiny_families.save("qwen3_moe", folder)
    return folder


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    """MLA, a dense layer, a shared expert: every kind of the sharding table."""
    folder = tmp_path_factory.mktemp("deepseek_v3")
    tiny_families.save("deepseek_v3", folder, num_hidden_layers=2)
    return folder


def test_awkward_layouts_pass(qwen, capsys):
    ranks = 'adapter.rank_pattern={"k_proj": 3, "experts.up": 2}'
    check_passes(capsys, qwen, "tp2,pp2,ep2,etp2tp2", "adapter.rank=5", ranks)


def test_context_parallel_layouts_pass(qwen, deepseek, capsys):
    """Four ranks share two key/value heads; MLA has as many as queries."""
    check_passes(capsys, qwen, "cp4ep2", "adapter.rank=5")
    check_passes(capsys, deepseek, "cp2,cp2tp2", "adapter.rank=5")


@pytest.mark.parametrize("init", ["adapter.expert_layout=shared_outer", "adapter.init=olora_tail"])
def test_other_forms_of_the_adapter_pass(qwen, capsys, init):
    # It subtracts its start: what it rounds grows with alpha / rank.
    check_passes(capsys, qwen, "tp2ep2dp2", "adapter.rank=3", "adapter.alpha=3", init)


def test_a_sum_left_out_fails_the_command(qwen, capsys):
    code, report = verify(capsys, qwen, "--layouts", "tp2,pp2", "--drop", "row.B.tp")
    assert code == 1 and not report["passed"]
    reference, tp2, pp2 = report["rows"]
    assert reference["passed"] and pp2["passed"]
    assert not tp2["passed"] and "hold different copies of row.B" in tp2["failure"]
    faults = tp2["checks"]["gradients"]["faults"]
    assert {fault["entry"] for fault in faults} == {"row.B"}
    assert faults[0]["summed_over"] == {"tp": 2} and faults[0]["error"] > 0.1
    assert tp2["checks"]["logprobs"]["passed"]


def mutated(worker, spec, adapter, batch, table, entries):
    """Gradients as they should be, and with each entry of the table left out."""
    worker.set_adapter(adapter)
    parts, gradients = [], worker.engine.adapters.gradients
    for entry in [None, *entries]:
        faulty = sharding.without([entry] if entry else [])
        gradients.layout = dataclasses.replace(gradients.layout, table=faulty)
        loss, norm, shards = worker.gradients(batch, table)
        parts.append(jobs.Part({"gradients": shards}, loss=loss, grad_norm=norm))
    return parts


def gradients_without(model, settings, layout_name, entries):
    """(spec, layout, gradients of one rank, gradients of the layout for None and each entry)."""
    config = make_config(str(model), ["adapter.rank=4", "trainer.device=cpu", *settings])
    spec, (layout, alone) = plan(config, f"{layout_name},tp1", model)
    arguments = (random_adapter(spec), *random_batch(spec, 12, lengths=(4, 9)))
    ((expected,),) = run_ranks(alone.config, model, mutated, *arguments, ())
    parts = run_ranks(layout.config, model, mutated, *arguments, entries)
    found = [jobs.gather(spec, ranks).tensors["gradients"] for ranks in zip(*parts, strict=True)]
    return spec, layout, jobs.gather(spec, [expected]).tensors["gradients"], found


def entries_of(shared: bool, axes: tuple[str, ...]) -> list[tuple]:
    """Entries of the table that a model of that expert layout has."""
    left_out = "experts_" if shared else "shared_"
    table = sharding.reductions()
    return [entry for entry in table if not entry[0].startswith(left_out) and entry[2] in axes]


ALL_AXES = ("tp", "dp", "etp", "expert_dp")
MUTATIONS = {
    "per_expert": ("tp2dp2etp2", (), entries_of(False, ALL_AXES)),
    "shared_outer": ("tp2dp2etp2", ("adapter.expert_layout=shared_outer",),
                     [e for e in entries_of(True, ALL_AXES) if e[0].startswith("shared_")]),
    "shared_outer_ep": ("ep2dp2", ("adapter.expert_layout=shared_outer",),
                        entries_of(True, ("ep",))),
}  # fmt: skip


def test_the_mutations_are_all_entries_of_the_table():
    covered = [entry for _, _, entries in MUTATIONS.values() for entry in entries]
    assert sorted(covered) == sorted(sharding.reductions())


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_sum_left_out_is_named(name, deepseek):
    layout_name, settings, entries = MUTATIONS[name]
    spec, layout, expected, found = gradients_without(deepseek, settings, layout_name, entries)
    sizes = layout.sizes()
    for entry, gradients in zip([None, *entries], found, strict=True):
        errors = gradient_errors(gradients, expected)
        check = tensor_check(spec, sizes, "gradients", errors, TOLERANCE)
        if entry is None:
            assert check.passed, check
            continue
        kind, tensor, axis = entry
        assert sizes[axis] > 1, f"{layout_name} cannot show {entry}"
        assert not check.passed and {f.entry for f in check.faults} == {f"{kind}.{tensor}"}, entry
        assert {f.name for f in check.faults} == {
            f"{site.name}.{tensor}" for site in spec if sharding.kind_of(site) == kind
        }
        row = dataclasses.replace(Row(layout_name, layout.world_size), checks=[check])
        (line, *_) = Report("", "cpu", "float32", 12, [row], 0.0).explanations()
        assert check.faults[0].name in line and f"{kind}.{tensor}: summed over" in line
        assert f"{axis} ({sizes[axis]} ranks)" in line


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3_moe", "deepseek_v3"])
def test_tiny_models_pass_in_the_seven_layouts(model, capsys):
    check_passes(capsys, model, DEFAULT_LAYOUTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_awkward_shapes_pass(name, tmp_path, capsys):
    """Five layers, that PP and VPP do not divide, and odd ranks."""
    tiny_families.save(name, tmp_path, num_hidden_layers=5)
    ranks = ("adapter.rank=5", "adapter.expert_rank=3")
    check_passes(capsys, tmp_path, f"{DEFAULT_LAYOUTS},pp2vpp2,tp2dp2,cp2pp2vpp2,cp2dp2ep2", *ranks)


@pytest.mark.parametrize(("name", "form"), [("deepseek_v3", "fp8"), ("qwen3_moe", "int4")])
def test_a_quantised_base_passes(name, form, tmp_path, capsys):
    packed, _ = make_pair(name, tmp_path, form)
    check_passes(capsys, packed, "tp2,ep2", "adapter.rank=3")


def test_experts_that_would_be_cut_in_their_groups_are_refused(tmp_path, capsys):
    packed, _ = make_pair("deepseek_v3", tmp_path, "fp8")
    assert cli.main(["verify", "layout", "--model", str(packed), "--layouts", "tp2,etp2tp2"]) == 2
    said = capsys.readouterr().err
    assert "etp2tp2: trainer.etp=2 cuts experts of the width 128, fp8" in said
