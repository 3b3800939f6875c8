"""`verify layout` without ranks: names of layouts, what is refused, errors and what they say."""

from __future__ import annotations

import json
from dataclasses import replace

import hollow_model
import numpy as np
import pytest
from published_configs import QWEN3_30B_A3B

from lora_moe_rl import cli
from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import AdapterConfig
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.verify.compare import TOLERANCES, checkpoint_check, compare, gradient_errors
from lora_moe_rl.verify.inputs import random_adapter, random_batch
from lora_moe_rl.verify.jobs import MOMENTS, Outcome, trained
from lora_moe_rl.verify.layout import DEFAULT_LAYOUTS, make_config
from lora_moe_rl.verify.layout_report import Report, Row
from lora_moe_rl.verify.layouts import parse_layout, parse_layouts
from lora_moe_rl.verify.report import Check

SMALL = QWEN3_30B_A3B | {
    "num_hidden_layers": 2, "hidden_size": 16, "vocab_size": 50, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "moe_intermediate_size": 8, "num_experts": 6,
    "num_experts_per_tok": 2,
}  # fmt: skip
SHAPE = ModelShape.from_hf_config(SMALL)
TOLERANCE = TOLERANCES["cpu", "float32"]


def spec_of(**adapter) -> AdapterSpec:
    return AdapterSpec.build(SHAPE, AdapterConfig(**{"rank": 3, **adapter}))


SPEC = spec_of()


@pytest.mark.parametrize(
    ("name", "world_size", "sizes"),
    [
        ("tp2", 2, {"tp": 2, "expert_dp": 2}),
        ("ep2", 2, {"ep": 2, "dp": 2}),
        ("tp2ep2", 2, {"tp": 2, "ep": 2}),
        ("etp2tp2", 2, {"tp": 2, "etp": 2}),
        ("pp2ep2", 4, {"ep": 2, "dp": 2}),
        ("tp2dp2", 4, {"tp": 2, "dp": 2, "expert_dp": 4}),
        ("pp2vpp1ep3dp3", 6, {"ep": 3, "dp": 3}),
        ("cp2", 2, {"dp": 2, "expert_dp": 2}),
        ("tp2cp2ep8", 8, {"tp": 2, "dp": 4, "ep": 8}),
    ],
)
def test_a_layout_has_as_few_ranks_as_fit(name, world_size, sizes):
    layout = parse_layout(name, make_config("x"))
    ones = dict.fromkeys(("tp", "dp", "ep", "etp", "expert_dp"), 1)
    assert layout.world_size == world_size and layout.sizes() == ones | sizes


@pytest.mark.parametrize("name", ["", "tp", "2tp", "tp2xp2", "cp", "tp2tp2", "tp0", "ep2dp3"])
def test_what_is_no_layout_is_refused(name):
    with pytest.raises(ConfigError, match="--layouts"):
        parse_layout(name, make_config("x"))


def test_layouts_that_the_model_does_not_allow_are_refused_together():
    with pytest.raises(ConfigError) as raised:
        parse_layouts(["tp2", "ep4", "tp4"], make_config("x"), SHAPE)
    assert "ep4: trainer.ep=4 does not divide the model's 6 experts" in str(raised.value)
    assert "tp4: trainer.tp=4 does not divide the model's 2 key/value" in str(raised.value)
    assert "tp2:" not in str(raised.value)
    assert len(parse_layouts(DEFAULT_LAYOUTS.split(","), make_config("x"), SHAPE)) == 7


def test_only_settings_that_are_read_are_taken():
    config = make_config("x", ["adapter.rank=3", "trainer.dtype=bfloat16", "seed=4"])
    assert (config.adapter.rank, config.trainer.dtype, config.seed) == (3, "bfloat16", 4)
    for setting in ("trainer.lr=1", "trainer.tp=2", "rollout.tp=2"):
        with pytest.raises(ConfigError, match="does not read"):
            make_config("x", [setting])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layouts", "tp3"], "tp3: trainer.tp=3 does not divide"),
        (["--layouts", ","], "names no layout"),
        (["--layouts", "tp2", "--drop", "row.A.tp"], "row.A.tp is not in the table"),
        (["--layouts", "tp2", "adapter.rnk=2"], "adapter.rank"),
    ],
)
def test_the_command_refuses_before_anything_starts(tmp_path, capsys, arguments, message):
    hollow_model.save(tmp_path, SMALL)
    assert cli.main(["verify", "layout", "--model", str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_inputs_are_the_same_each_time_and_every_factor_has_a_gradient():
    (batch, table), (again, _) = random_batch(SPEC, 5), random_batch(SPEC, 5)
    assert all((a == b).all() for a, b in zip(batch.token_ids, again.token_ids, strict=True))
    assert table.coverage == 1 and table.num_samples == 5
    adapter = random_adapter(SPEC)
    assert {name: t.shape for name, t in adapter.items()} == SPEC.tensor_shapes
    assert all(tensor.any() and tensor.dtype == np.float32 for tensor in adapter.values())


def test_what_is_not_trained_stays_as_it_starts():
    spec = spec_of(init="olora")
    start = {name: np.full(shape, 7, np.float32) for name, shape in spec.tensor_shapes.items()}
    adapter = random_adapter(spec, start=start)
    assert (adapter["layers.0.q_proj.A"][3:] == 7).all()
    assert (adapter["layers.0.q_proj.A"][:3] != 7).all()
    assert (adapter["layers.0.experts.down.B"][..., 3:] == 7).all()
    assert trained(spec)["layers.0.experts.down.B"] == (6, 16, 3)
    with pytest.raises(ValueError, match="start"):
        random_adapter(spec)


def outcome(seed: int = 0) -> Outcome:
    rng = np.random.default_rng(seed)

    def tensors():
        return {n: rng.normal(size=s).astype(np.float32) for n, s in SPEC.tensor_shapes.items()}

    names = ("initial", "gradients", "trained", "loaded")
    found = {name: tensors() for name in names}
    for moment in MOMENTS:
        found[f"trained {moment}"] = found[f"loaded {moment}"] = tensors()
    found["loaded"] = found["trained"]
    return Outcome(found, -0.5, 3.0, [np.array([-2.0, -20.0])], adapter=tensors())


SIZES = {"tp": 2, "dp": 1, "ep": 1, "etp": 1, "expert_dp": 2}
ONE = outcome()


def changed(quantity: str, name: str, change) -> Outcome:
    whole = ONE.tensors[quantity]
    wrong = whole | {name: change(whole[name])}
    return replace(ONE, tensors=ONE.tensors | {quantity: wrong})


def failures(got: Outcome) -> dict[str, list[str]]:
    checks = compare(SPEC, SIZES, got, ONE, TOLERANCE)
    return {c.quantity: [f.name for f in c.faults] for c in checks if not c.passed}


def test_equal_outcomes_pass_and_each_wrong_quantity_is_found():
    assert failures(ONE) == {}
    assert list(failures(replace(ONE, loss=-0.5001))) == ["loss"]
    assert list(failures(replace(ONE, grad_norm=3.0001))) == ["grad norm"]
    assert list(failures(replace(ONE, loss=float("nan")))) == ["loss"]
    assert failures(replace(ONE, logprobs=[np.array([-2.0, -20.0001])])) == {}
    assert list(failures(replace(ONE, logprobs=[np.array([-2.0001, -20.0])]))) == ["logprobs"]
    name = "layers.1.o_proj.B"
    for quantity, check in (("initial", "initial"), ("gradients", "gradients"),
                            ("trained", "adapter")):  # fmt: skip
        assert failures(changed(quantity, name, lambda t: t * 1.1)) == {check: [name]}
        assert failures(changed(quantity, name, lambda t: t * np.nan)) == {check: [name]}
    assert failures(changed("gradients", name, lambda t: t * (1 + 2e-6))) == {}


def test_a_quantity_that_was_not_come_to_does_not_pass():
    partial = {k: v for k, v in ONE.tensors.items() if not k.startswith(("trained", "loaded"))}
    assert failures(replace(ONE, tensors=partial)) == {"adapter": []}
    assert not checkpoint_check(SPEC, SIZES, [(replace(ONE, tensors=partial), ONE)]).passed


def test_a_tiny_gradient_that_is_wrong_is_not_lost_in_the_rounding():
    expected = ONE.tensors["gradients"]
    name, other = "layers.0.q_proj.A", "layers.0.experts.down.B"
    small = expected | {name: expected[name] * 1e-6}
    halved = small | {name: small[name] / 2}
    errors = gradient_errors(halved, small)
    assert errors[name] > 10 * TOLERANCE["gradients"] and errors[other] == 0


def test_a_checkpoint_must_be_equal_in_every_bit():
    assert checkpoint_check(SPEC, SIZES, [(ONE, ONE)]).passed
    name = "layers.0.experts.up.A"
    for quantity in ("loaded", f"loaded {MOMENTS[1]}"):
        flipped = changed(quantity, name, lambda t: np.nextafter(t, np.float32(9)))
        check = checkpoint_check(SPEC, SIZES, [(ONE, ONE), (flipped, ONE)])
        assert not check.passed and [f.name for f in check.faults] == [name]


def report(got: Outcome, failure: str | None = None) -> Report:
    checks = [*compare(SPEC, SIZES, got, ONE, TOLERANCE), Check("checkpoint", 0.0, 0.0)]
    row = Row("tp2dp1", 2, checks, 1.0, failure)
    return Report("x", "cpu", "float32", 3, [row], 1.0)


def test_a_fault_is_named_with_its_entry_of_the_table():
    wrong = report(changed("gradients", "layers.1.o_proj.B", lambda t: t / 2))
    (line,) = wrong.explanations()
    assert line == (
        "tp2dp1: gradients: off are layers.1.o_proj.B by 0.5; row.B: summed over tp (2 ranks)"
    )
    down = report(changed("gradients", "layers.0.experts.down.A", lambda t: t / 2))
    assert "experts_row.A: summed over expert_dp (2 ranks)" in down.explanations()[0]
    assert "column.B: summed over no ranks here, cut over tp (2 ranks)" in " ".join(
        report(changed("gradients", "layers.0.q_proj.B", lambda t: t / 2)).explanations()
    )


def test_rounding_is_called_by_its_name_and_a_failure_by_its_first_line():
    rounding = report(changed("gradients", "layers.1.o_proj.B", lambda t: t * 1.0001))
    assert "--tolerance" in rounding.explanations()[-1]
    assert report(ONE, "rank 1 failed: why\ntraceback").explanations() == [
        "tp2dp1: rank 1 failed: why"
    ]


def test_json_holds_every_fault_and_no_nan():
    wrong = report(changed("gradients", "layers.1.o_proj.B", lambda t: t * np.nan)).as_json()
    text = json.dumps(wrong, allow_nan=False)
    (row,) = json.loads(text)["rows"]
    assert not wrong["passed"] and not row["passed"] and row["checks"]["loss"]["passed"]
    assert row["checks"]["gradients"]["error"] is None
    assert row["checks"]["gradients"]["faults"] == [
        {"name": "layers.1.o_proj.B", "error": None, "entry": "row.B",
         "summed_over": {"tp": 2}, "cut_over": {}}
    ]  # fmt: skip
