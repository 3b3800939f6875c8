"""`lora-moe-rl verify replay` on both shapes: real vLLM, Hugging Face and Megatron."""

import json

import pytest
import tiny_families
from engine_fixtures import save_random_model

from lora_moe_rl.verify import replay, replay_record

# Seven layers, the first one dense: three MoE layers and more on each of two stages.
CASES = {
    "qwen3_moe": (
        {"num_hidden_layers": 7, "mlp_only_layers": [0]},
        "roomy,chunked,tight,tp2",
        "tp2ep2,pp2vpp2",
        {},
    ),
    # Grouped routing, whose groups Megatron scores otherwise than the published model.
    "deepseek_v3": (
        {"num_hidden_layers": 7},
        "roomy,tight",
        "tp2,pp2+recompute,cp2tp2",
        {"prefix-cache hits": "caches no prefixes"},
    ),
    # Two layers of three have a sliding window, and blocks of the cache are shared.
    "gpt_oss": ({}, "roomy,tight", "tp2ep2,pp2", {}),
}


@pytest.mark.slow
def test_routes_of_two_data_parallel_ranks(tmp_path, capsys):
    """Recorded by each for its own requests, of experts that are spread over both."""
    save_random_model("qwen3_moe", tmp_path)
    code = replay.main(
        ["--model", str(tmp_path), "--engines", "roomy,dp2ep", "--layouts", "tp2", "--json"]
    )
    report = json.loads(capsys.readouterr().out)
    assert code == 0 and report["passed"], json.dumps(report, indent=1)
    records = {row["name"]: row for row in report["records"]}
    for name, groups in (("dp 2", 1), ("dp 2, experts' LoRA", 2)):
        row = records[name]
        assert row["coverage"] == 1 and row["routes"] >= 3000 and not row["differences"]
        few, many = (groups * replay_record.RESPONSE * number for number in (4, 12))
        assert row["proof"].startswith(f"ranks sampled {many} and {few} tokens")
    assert report["replays"][0]["routes"] > sum(row["routes"] for row in report["records"])


@pytest.mark.minute
@pytest.mark.parametrize(
    "name",
    ["qwen3_moe", *(pytest.param(name, marks=pytest.mark.slow) for name in list(CASES)[1:])],
)
def test_verify_replay(name, tmp_path, capsys):
    changes, engines, layouts, absent = CASES[name]
    tiny_families.save(name, tmp_path, **changes)
    code = replay.main(
        ["--model", str(tmp_path), "--engines", engines, "--layouts", layouts, "--json"]
    )
    report = json.loads(capsys.readouterr().out)
    assert code == 0 and report["passed"], json.dumps(report, indent=1)
    records = {row["name"]: row for row in report["records"]}
    for condition, reason in absent.items():
        assert reason in records.pop(condition)["absent"]
    wanted = {"plain", "batched", "aborted and resumed", "experts' LoRA", "preemption"}
    if name != "deepseek_v3":
        wanted |= {"prefix-cache hits"}
    if name == "qwen3_moe":
        wanted |= {"chunked prefill", "tp 2"}
    assert set(records) == wanted
    for row in records.values():
        assert row["coverage"] == 1 and row["routes"] >= 3000 and not row["differences"]
    for row in report["replays"]:
        assert row["micro_batches"] > 2 and row["routes"] > 3000
        assert row["caught"]["expert"]["wrong_routes"] >= 1
        assert "was not routed as recorded in layer" in row["caught"]["expert"]["audit"]
    assert report["other_experts_moved"] > 0.5
