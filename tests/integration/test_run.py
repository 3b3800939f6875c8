"""Whole runs through the command line, with real engines: what they leave behind, and resuming."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_run import RECIPE, ROOT, CliRun
from matplotlib.image import imread
from ranks import spec_of
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lora_moe_rl.adapters.peft import peft_tensors
from lora_moe_rl.adapters.shards import Shard, assemble
from lora_moe_rl.config.recipes import load_config
from lora_moe_rl.files.checkpoint import newest_valid
from lora_moe_rl.files.jsonl import read_jsonl
from lora_moe_rl.models.directory import resolve_model
from lora_moe_rl.telemetry import console

pytestmark = pytest.mark.timeout(900)

METRICS = {
    "reward": ("mean", "std", "failed"),
    "loss": ("policy", "kl"),
    "optim": ("grad_norm", "skipped"),
    "mismatch": ("kl", "max_abs_logprob_diff"),
    "replay": ("coverage", "disagreement"),
    "adapter": ("version",),
    "refit": ("seconds", "bytes"),
    "rollout": ("tokens_per_second", "truncated"),
    "time": ("rollout", "reward", "train", "refit", "step"),
}
# What two runs that do the same need not share: the clock, memory, and the last bit of the engine's
# logprobs, which depends on the requests that it happens to batch together.
MEASURED = re.compile(
    r"time/.*|idle/.*|perf/.*|memory/.*|refit/(?!bytes).*|.*/tokens_per_second|mismatch/.*"
)


@dataclass
class Finished:
    folder: Path
    output: str
    leftovers: list[str]

    @property
    def records(self) -> list[dict]:
        return list(read_jsonl(self.folder / "metrics.jsonl"))

    @property
    def samples(self) -> list[dict]:
        return list(read_jsonl(self.folder / "samples.jsonl"))


def run_to_end(folder: Path, *arguments: object, exit_code: int = 0) -> Finished:
    run = CliRun(
        "train", *arguments, f"logging.run_dir={folder}", output=folder.with_suffix(".out")
    )
    try:
        assert run.finish() == exit_code, run.output
        return Finished(folder, run.output, run.leftovers())
    finally:
        run.end()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Iterator[Finished]:
    """The demo with 4 steps: Qwen3-MoE on two Megatron ranks with EP 2, r3."""
    resolve_model("qwen3_moe")
    yield run_to_end(
        tmp_path_factory.mktemp("whole") / "run",
        RECIPE,
        *("trainer.steps=4", "checkpoint.every=2"),
        *("tracker=wandb", "tracker.mode=offline"),
        *("logging.tokens=true", "logging.routes=true"),
    )


def check_records(records: list[dict], num_steps: int) -> None:
    """What holds in every step of a run with r3 that goes well."""
    assert [r["step"] for r in records] == list(range(1, num_steps + 1))
    for record in records:
        for section, names in METRICS.items():
            for name in names:
                assert math.isfinite(record[f"{section}/{name}"])
        assert record["mismatch/kl"] <= 1e-6
        assert record["mismatch/max_abs_logprob_diff"] <= 1e-4
        assert record["refit/max_diff"] <= 1e-4
        assert record["replay/coverage"] == 1
        assert record["adapter/version"] == record["step"] - 1
        assert record["optim/skipped"] == record["reward/failed"] == 0
        assert record["optim/grad_norm"] > 0 and record["refit/bytes"] > 1e6
        assert record["memory/peak"] > 0.1 and record["memory/engines_peak"] > 0.1
        stages = sum(record[f"time/{s}"] for s in ("rollout", "reward", "train", "refit"))
        assert 0 < stages <= record["time/step"]


@pytest.mark.minute
def test_every_step_is_on_record(whole):
    check_records(whole.records, num_steps=4)
    assert whole.leftovers == []


def test_the_console_shows_actors_steps_and_the_end(whole):
    lines = whole.output.splitlines()
    for start in ("trainer-0: device ", "trainer-1: device ", "engine-0: vllm "):
        assert any(line.startswith(start) for line in lines), whole.output
    steps = console.StepLines(load_config(str(whole.folder / "config.yaml")))
    at = lines.index(steps.header)
    assert lines[at + 1 : at + 5] == [steps.line(record) for record in whole.records]
    assert "mismatch KL (max)" in whole.output and f"{whole.folder}/curves.png" in whole.output
    assert "Traceback" not in whole.output and "WARNING" not in whole.output


def test_experts_of_tokens_are_those_that_hugging_face_chooses(whole):
    """In step 1, whose samples are the base's: its adapter changes nothing yet."""
    path = resolve_model("qwen3_moe")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompts = {
        sample["sample"]: sample["prompt"] for sample in whole.samples if sample["step"] == 1
    }
    tokens = [one for one in read_jsonl(whole.folder / "tokens.jsonl") if one["step"] == 1]
    assert len(tokens) == 4
    for one in tokens:
        prompt = tokenizer.encode(prompts[one["sample"]])
        ids = torch.tensor([prompt + one["ids"]])
        with torch.no_grad():
            logits = model(ids, output_router_logits=True).router_logits
        top_k = len(one["experts"][0][0])
        chosen = torch.stack([layer.topk(top_k).indices.sort().values for layer in logits], dim=1)
        *fed, last = one["experts"]
        assert one["layers"] == list(range(len(logits))) and last is None and fed
        assert np.sort(fed).tolist() == chosen[len(prompt) : -1].tolist()


def test_the_saved_config_runs_again(whole):
    saved = whole.folder / "config.yaml"
    command = [sys.executable, "-m", "lora_moe_rl", "train", saved, "--dry-run"]
    assert subprocess.run(command, capture_output=True, text=True).stdout == saved.read_text()


def test_samples_carry_text_reward_and_version(whole):
    samples = whole.samples
    assert [s["step"] for s in samples] == [step for step in (1, 2, 3, 4) for _ in range(4)]
    for sample in samples:
        assert sample["versions"] == [sample["step"] - 1]
        assert sample["reward"] == float(sample["response"] == str(eval(sample["prompt"][:-1])))
    assert len({s["drawn"] for s in samples}) == 16  # each of another prompt


def checkpoint_tensors(path: Path, kind: str, spec) -> dict[str, np.ndarray]:
    """Whole tensors of one kind ("adapter", "exp_avg") from the slices of all ranks."""
    shards = []
    for file in sorted(path.glob("trainer_*.safetensors")):
        for key, values in load_file(file).items():
            found, name, start = key.split("|")
            if found == kind:
                shards.append(Shard(name, tuple(map(int, start.split(","))), values))
    return assemble(spec.tensor_shapes, shards)


def test_the_adapter_is_that_of_the_newest_checkpoint(whole):
    spec = spec_of(resolve_model("qwen3_moe"), load_config(str(whole.folder / "config.yaml")))
    newest = newest_valid(whole.folder / "checkpoints")
    assert newest.path.name == "step-000004" and newest.metadata["trainer"]["version"] == 4
    expected = dict(peft_tensors(spec, checkpoint_tensors(newest.path, "adapter", spec)))
    exported = load_file(whole.folder / "adapter" / "adapter_model.safetensors")
    assert exported.keys() == expected.keys()
    for name, values in exported.items():
        np.testing.assert_array_equal(values, expected[name], err_msg=name)
        # An expert that no token was routed to has learned nothing.
        assert np.any(values) or ".experts." in name, f"{name} was not trained"
    for experts in (range(4), range(4, 8)):  # of each EP rank
        paths = [f"layers.{layer}.mlp.experts.{e}.down_proj" for layer in range(4) for e in experts]
        assert any(np.any(exported[f"base_model.model.model.{p}.lora_B.weight"]) for p in paths)
    config = json.loads((whole.folder / "adapter" / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and config["r"] == 16


def test_logs_curves_and_wandb_are_there(whole):
    logs = {path.name for path in (whole.folder / "logs").iterdir()}
    actors = {"controller.log", "engine-0.log", "trainer-0.log", "trainer-1.log"}
    assert {log for log in logs if not log.endswith(".libraries.log")} == actors
    assert "vllm" in (whole.folder / "logs" / "engine-0.log").read_text().lower()
    height, width, channels = imread(whole.folder / "curves.png").shape
    assert height > 300 and width > 1000 and channels in (3, 4)
    (wandb_file,) = whole.folder.glob("wandb/offline-run-*/*.wandb")
    assert wandb_file.stat().st_size > 1000


@pytest.mark.slow
def test_a_run_resumed_past_a_corrupt_checkpoint_equals_one_that_was_not_stopped(whole, tmp_path):
    """Samples, losses and trainer state, to the last bit. It goes on from step 2, since one byte of
    step 4 is wrong."""
    folder = tmp_path / "run"
    shutil.copytree(whole.folder, folder)
    corrupt = folder / "checkpoints/step-000004/trainer_00001.safetensors"
    content = bytearray(corrupt.read_bytes())
    content[len(content) // 2] ^= 1
    corrupt.write_bytes(content)

    resumed = run_to_end(folder, folder / "config.yaml", "--resume")
    skipped = f"skipped {corrupt.parent}: {corrupt.name} is corrupt: its SHA-256 differs"
    assert skipped in resumed.output
    assert f"going on from {folder}/checkpoints/step-000002" in resumed.output
    assert resumed.leftovers == []

    assert resumed.samples == whole.samples
    check_records(resumed.records, num_steps=4)
    for ours, theirs in zip(resumed.records, whole.records, strict=True):
        assert {k: v for k, v in ours.items() if not MEASURED.fullmatch(k)} == {
            k: v for k, v in theirs.items() if not MEASURED.fullmatch(k)
        }
    assert resumed.records[:2] == whole.records[:2]
    backup = [r["step"] for r in read_jsonl(folder / "metrics.jsonl.bak")]
    assert backup == [3, 4]
    assert newest_valid(folder / "checkpoints").skipped == []
    for name in ("trainer_00000.safetensors", "trainer_00001.safetensors"):
        path = Path("checkpoints/step-000004") / name
        assert (folder / path).read_bytes() == (whole.folder / path).read_bytes()


JSONL = ROOT / "recipes/data/tiny_arithmetic.jsonl"


@pytest.mark.slow
def test_on_four_ray_nodes_the_first_step_is_the_same(whole, tmp_path):
    """Two trainer ranks and two engines, each on a node of its own."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 150_000_000}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        for _ in range(3):
            cluster.add_node(**node)
        cluster.wait_for_nodes()
        run = CliRun(
            *("train", RECIPE, "trainer.steps=1", "rollout.engines=2"),
            f"logging.run_dir={tmp_path / 'run'}",
            output=tmp_path / "run.out",
            ray_address=cluster.address,
        )
        try:
            assert run.finish() == 0, run.output
        finally:
            run.end()
    finally:
        cluster.shutdown()
    (record,) = read_jsonl(tmp_path / "run/metrics.jsonl")
    for name in ("loss/policy", "optim/grad_norm", "reward/mean", "rollout/response_length"):
        assert record[name] == pytest.approx(whole.records[0][name], rel=1e-5, abs=1e-7), name


@pytest.mark.slow
def test_a_jsonl_file_and_a_named_reward_need_no_python(tmp_path):
    """The DeepSeek shape (MLA, sigmoid router, shared expert, first layer dense), on one rank."""
    resolve_model("deepseek_v3")
    run = run_to_end(
        tmp_path / "run",
        *("model=deepseek_v3", f"data.path={JSONL}", "trainer.steps=2"),
        "reward.function=lora_moe_rl.rewards:exact_match",
    )
    check_records(run.records, num_steps=2)
    answers = {row["prompt"]: row["answer"] for row in read_jsonl(JSONL)}
    assert run.samples and all(
        s["reward"] == float(s["response"] == answers[s["prompt"]]) for s in run.samples
    )
    assert {s["reward"] for s in run.samples} <= {0.0, 1.0}
    assert run.records[0]["reward/mean"] > 0.05
    assert run.leftovers == []


REWARD = """
def reward(prompts, completions, deed, **columns):
    match deed[0]:
        case "raise": raise RuntimeError("no such luck")
        case "nan": return [float("nan"), *range(1, len(completions))]
        case "none": return [None] * len(completions)
    return [float(len(text) % 2) for text in completions]
"""


@pytest.mark.slow
def test_failed_rewards_are_masked_and_counted_until_there_are_too_many(tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    deeds = ["fine", "raise", "nan", "none", "fine", "fine", "raise", "raise", "raise", "fine"]
    rows = [{"prompt": f"{i}+{i}=", "deed": deed} for i, deed in enumerate(deeds)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = run_to_end(
        tmp_path / "run",
        *(f"data.path={tmp_path}/rows.jsonl", "data.order=sequential", "trainer.steps=9"),
        *(f"reward.function={tmp_path}/reward.py:reward", "reward.max_failed=0.5"),
        *("algorithm.prompts_per_step=5", "algorithm.group_size=4", "checkpoint.every=0"),
        "logging.samples_per_step=20",
        exit_code=1,
    )
    (record,) = run.records
    assert record["reward/failed"] == 5 and record["optim/skipped"] == 0
    trained = [sample for sample in run.samples if sample["step"] == 1]
    by_deed = {deed: [s for s in trained if s["row"] == deeds.index(deed)] for deed in deeds}
    rewards = {deed: [s["reward"] for s in samples] for deed, samples in by_deed.items()}
    assert rewards["raise"] == [None] * 4 == rewards["none"]
    assert rewards["nan"] == [None, 1.0, 2.0, 3.0]
    assert None not in rewards["fine"]
    # What has no reward has no say: no advantage, and its tokens are not in the loss.
    unscored = [s for s in trained if s["reward"] is None]
    assert len(unscored) == 9 and all(s["advantage"] == 0 for s in unscored)
    in_loss = sum(s["tokens"] for s in trained if s["reward"] is not None)
    assert record["loss/tokens"] == in_loss

    error = " ".join(run.output.split())
    assert "error: step 2: 12 of 20 rewards failed, more than reward.max_failed=0.5 allows" in error
    assert re.search(r"prompt [678]: \S+ raised RuntimeError\('no such luck'\)", error)
    # The samples of the step that stopped the run are kept; what was trained before it is saved.
    kept = [sample.get("failure") for sample in run.samples if sample["step"] == 2]
    assert len(kept) == 20 and sum("no such luck" in str(reason) for reason in kept) == 12
    assert newest_valid(run.folder / "checkpoints").path.name == "step-000001"
    assert run.leftovers == []
