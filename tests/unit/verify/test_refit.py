"""`verify refit` without engines: combinations, faults, and what the report says."""

from __future__ import annotations

import itertools
import json
import math
from types import SimpleNamespace

import hollow_model
import numpy as np
import pytest
import torch
from published_configs import QWEN3_30B_A3B, shrunk

from lora_moe_rl import cli
from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import AdapterConfig, TrainerConfig
from lora_moe_rl.config.overrides import with_settings
from lora_moe_rl.errors import ConfigError, RefitError
from lora_moe_rl.refit.plan import EngineLayout, make_plan
from lora_moe_rl.verify import refit_run
from lora_moe_rl.verify.comparisons import largest, largest_scaled
from lora_moe_rl.verify.refit import DEFAULT_ENGINES, make_config
from lora_moe_rl.verify.refit_plan import covering, parse_engine, parse_fault
from lora_moe_rl.verify.refit_reference import choose, other_last_bits
from lora_moe_rl.verify.refit_report import Report, Row

CONFIG = make_config("x")
ENGINES = DEFAULT_ENGINES["adapter"].split(",")


def small(config: dict) -> dict:
    """Two layers that two ranks divide."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return shrunk(config) | sizes | {"num_experts": 4}


def spec_of(config: dict, **adapter) -> AdapterSpec:
    shape = ModelShape.from_hf_config(small(config))
    return AdapterSpec.build(shape, AdapterConfig(**{"rank": 4, **adapter}))


QWEN = spec_of(QWEN3_30B_A3B)


def test_an_engine_that_fails_before_its_scores_says_why_and_ends_nothing(monkeypatch, tmp_path):
    class NoTokenizer:
        def __init__(self, *arguments):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            pass

        def start(self):
            raise RefitError("no tokenizer")

    monkeypatch.setattr(refit_run, "EngineProcess", NoTokenizer)
    engine = parse_engine("tp1", CONFIG, QWEN)
    found = refit_run.RefitVerification(CONFIG, QWEN, tmp_path, [engine], [], [], 1)
    found.report = Report("x", "per_expert", "cpu", "float32", 1e-5)
    found.folder = tmp_path
    found._engine(engine)
    (row,) = found.report.rows
    assert row.failure == "no tokenizer" and row.seconds is not None


@pytest.mark.parametrize(
    "names",
    [
        (
            DEFAULT_ENGINES["adapter"].split(","),
            ["tp2", "pp2", "ep2", "tp2ep2"],
            ["shm", "distributed"],
        ),
        (["tp1"], ["tp2", "pp2"], ["shm", "distributed", "directory"]),
        (["tp1"], ["tp2"], ["shm"]),
    ],
)
def test_every_two_meet_and_not_all_three(names):
    found = covering(*names)
    product = list(itertools.product(*names))
    for pairs in itertools.combinations(range(3), 2):
        wanted = {tuple(c[i] for i in pairs) for c in product}
        assert {tuple(c[i] for i in pairs) for c in found} == wanted
    assert len(found) == len(set(found)) <= max(len(product) // 2 + 4, 1)
    assert found == [c for c in product if c in found]  # those of an engine together


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("tp1", EngineLayout(8)),
        ("tp2", EngineLayout(8, 2)),
        ("tp2ep", EngineLayout(8, 2, ep=True)),
        ("tp2fs", EngineLayout(8, 2, fully_sharded=True)),
    ],
)
def test_names_of_engines(name, layout):
    assert parse_engine(name, CONFIG, QWEN).layout(QWEN) == layout


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("ep2", "is not an engine"),
        ("tp2epfs", "is not an engine"),
        ("tp1ep", "rollout.ep=true has no effect with rollout.tp=1"),
        ("tp1fs", "rollout.fully_sharded=true has no effect with rollout.tp=1"),
        ("tp3", "rollout.tp=3 does not divide"),
    ],
)
def test_what_is_no_engine_is_refused(name, says):
    with pytest.raises(ConfigError, match=f"--engines: .*{says}"):
        parse_engine(name, CONFIG, QWEN)


def test_engines_that_would_cut_blocks_of_fp8_weights_are_refused():
    spec = AdapterSpec.build(ModelShape.from_hf_config(QWEN3_30B_A3B), AdapterConfig(rank=4))
    with pytest.raises(ConfigError, match=r"--engines: tp4: rollout.tp=4 cuts experts.gate"):
        parse_engine("tp4", CONFIG, spec, "fp8")
    parse_engine("tp4", CONFIG, spec, "int4")
    parse_engine("tp4ep", CONFIG, spec, "fp8")


def test_fully_sharded_adapters_need_a_rank_to_cut():
    with pytest.raises(ConfigError, match="here of rank 1, over rollout.tp=2"):
        parse_engine("tp2fs", CONFIG, spec_of(QWEN3_30B_A3B, rank=1))
    with pytest.raises(RefitError, match="do not divide an adapter slot of rank 1"):
        EngineLayout(slot_rank=1, tp=2, fully_sharded=True)


def test_experts_and_ranks_are_not_both_cut():
    settings = {"rollout": {"tp": 2, "ep": True, "fully_sharded": True}}
    with pytest.raises(ConfigError, match="either by expert or by rank"):
        with_settings(CONFIG, settings)


def test_faults():
    tensor = "layers.1.experts.up.B"
    engine = EngineLayout(slot_rank=8, tp=2, ep=True)
    plan = make_plan(QWEN, TrainerConfig(world_size=2, tp=2, ep=2), engine, 4)

    def of_tensor(plan):
        return {t.box: t.target for t in plan.transfers if f"{t.site.name}.{t.matrix}" == tensor}

    left_out = parse_fault(f"left-out:{tensor}", QWEN)(plan, engine)
    assert not of_tensor(left_out) and of_tensor(plan)
    assert len(left_out.transfers) == len(plan.transfers) - len(of_tensor(plan))
    misplaced = of_tensor(parse_fault(f"misplaced:{tensor}", QWEN)(plan, engine))
    assert misplaced == {box: 1 - target for box, target in of_tensor(plan).items()}

    for text, says in [
        ("lost:x", "'lost' is not a fault; there are left-out, misplaced"),
        ("left-out:layers.9.o_proj.A", "no tensor 'layers.9.o_proj.A'; layers.1.experts"),
    ]:
        with pytest.raises(ConfigError, match=says):
            parse_fault(text, QWEN)
    with pytest.raises(ConfigError, match="several ranks"):
        parse_fault(f"misplaced:{tensor}", QWEN)(plan, EngineLayout(8))


def report(**fields) -> Report:
    errors = 1e-6, 9e-6, 9e-6, 2e-6, {}, 0.3  # trainer, ranks, direct, merged, float64, effect
    row = Row("tp2ep", "ep2", "shm", *errors, [], 1000, 0.1, 2.0)
    for name, value in fields.items():
        setattr(row, name, value)
    return Report("m", "per_expert", "cpu", "float32", 5e-6, rows=[row])


UNLIKE = {"tensor": "layers.1.experts.up.B", "worker": 1, "error": 0.7, "experts": [0, 3]}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"trainer_error": 6e-6}, "logprobs differ from a one-rank trainer's by 6e-06"),
        ({"ranks_error": 2e-5}, "the trainer's logprobs differ from one rank's by 2e-05"),
        ({"ranks_error": math.nan}, "the trainer's logprobs differ from one rank's by nan"),
        ({"direct_error": 1.1e-5}, "logprobs differ from the sending trainer's by 1.1e-05"),
        ({"direct_error": math.nan}, "logprobs differ from the sending trainer's by nan"),
        ({"merged_error": math.nan}, "logprobs differ from those of the merged weights by nan"),
        ({"effect": 1e-4}, "logprobs differ from the base's by 0.0001 only"),
        ({"unlike": [UNLIKE]}, "layers.1.experts.up.B is not in its slot on engine rank 1, experts "
         "0, 3 of it (off by 0.7 of its largest value)"),
        ({"failure": "the engine is gone\nmore"}, "the engine is gone"),
        ({"trainer_error": None}, "logprobs were not compared with a one-rank trainer's"),
        ({"ranks_error": None}, "the trainer's logprobs were not compared with those of one rank"),
        ({"direct_error": None},
         "logprobs were not compared with those of the trainer that sent"),
        ({"merged_error": None}, "logprobs were not compared with those of the merged weights"),
        ({"effect": None}, "logprobs were not compared with the base's"),
        ({"unlike": None}, "what the slots hold was not compared"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(fields, says):
    found = report(**fields)
    assert not found.passed
    lines = found.explanations()
    assert lines[0] == f"tp2ep ep2 shm: {says}"
    logprobs = fields.keys() & {
        "trainer_error",
        "ranks_error",
        "direct_error",
        "merged_error",
        "effect",
    }
    logprobs = {name for name in logprobs if fields[name] is not None}
    assert any("not the refit" in line for line in lines) == bool(logprobs)
    told = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert not told["passed"] and not told["rows"][0]["passed"]


def test_what_is_right_passes():
    """Of an engine's base and of merged weights less is compared."""
    for fields in (
        {},
        {"unlike": None, "merged": True},
        {
            "trainer": "", "transport": "", "trainer_error": None, "ranks_error": None,
            "effect": None, "unlike": None,
        },
    ):  # fmt: skip
        found = report(**fields)
        assert found.passed and found.explanations() == [] and found.as_json()["passed"]


def test_scores_of_another_length_are_not_compared():
    for ours, theirs in [(np.zeros(1), np.zeros(5)), (np.zeros(5), np.zeros(1))]:
        with pytest.raises(ValueError, match="logprobs"):
            largest([ours], [theirs])
    with pytest.raises(ValueError, match="1 logprobs against 3"):
        largest_scaled([np.zeros(1)], [np.zeros(3)])
    assert largest_scaled([np.array([9.0, 0.0])], [np.array([0.5])]) == 0.5


def test_nan_is_not_a_small_difference():
    assert largest([np.array([0.0, 1.0])], [np.array([0.5, 1.0])]) == 0.5
    assert math.isnan(largest([np.array([np.nan, 1.0])], [np.array([0.0, 1.0])]))


def test_the_command_refuses_before_anything_starts(tmp_path, capsys):
    hollow_model.save(tmp_path, small(QWEN3_30B_A3B))
    (tmp_path / "tokenizer.json").write_text("{}")
    for arguments, says in [
        (["--transports", "pigeon"], "'pigeon' is not a transport"),
        (["--engines", "tp2ep,tp7"], "rollout.tp=7 does not divide"),
        (["--trainers", "ep3"], "ep3"),
        (["data.path=x"], "verify refit does not read 'data.path=x'"),
        (["--engines", "tp1", "--fault", "misplaced:layers.1.o_proj.A"], "several ranks"),
    ]:
        assert cli.main(["verify", "refit", "--model", str(tmp_path), *arguments]) == 2
        assert says in capsys.readouterr().err


def test_a_model_without_a_tokenizer_is_refused_before_anything_starts(tmp_path, capsys):
    hollow_model.save(tmp_path, small(QWEN3_30B_A3B))
    assert cli.main(["verify", "refit", "--model", str(tmp_path)]) == 2
    assert f"{tmp_path} has no tokenizer (none of tokenizer.json" in capsys.readouterr().err


def test_sequences_that_rounding_changes_least_come_first():
    """[4, 3] logprobs; of the second only its first counts, the third is not changed enough."""
    effect = np.array([[1, 0, 0], [1, 0, 0], [1e-4, 0, 1], [0, -1, 0]], dtype=np.float64)
    noise = np.array([[0, 3e-6, 0], [1e-6, 9e-6, 9e-6], [0, 0, 0], [2e-6, 0, 0]])
    lengths = np.array([4, 2, 3, 4])
    assert choose(effect, noise, lengths, 5e-3) == [1, 3, 0]
    assert choose(effect, noise, lengths, 2.0) == []


def test_other_last_bits_are_of_the_last_bit():
    linear, layer = torch.nn.Linear(4, 50), torch.nn.Identity()
    model = SimpleNamespace(model=torch.nn.Module())
    model.model.layers, model.model.inner = torch.nn.ModuleList([layer]), linear
    x, ones = torch.ones(3, 4), torch.full((3, 50), 1.5)
    right = linear(x)
    with other_last_bits(model, torch.Generator().manual_seed(0)):
        changed, passed = linear(x), layer(ones)
    for got, exact in ((changed, right), (passed, ones)):
        assert 0 < (got != exact).float().mean() <= 1
        assert ((got - exact).abs() <= 2.0**-22 * exact.abs()).all()
    assert torch.equal(linear(x), right)
