"""Real vLLM after a merged refit equals, to the bit, one started on a checkpoint merged by hand."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import hf
import numpy as np
import psutil
import pytest
import tiny_families
import torch
import xxhash
from cli_run import RECIPE, CliRun
from refit_ranks import make_layouts, make_senders
from safetensors.torch import load_file, save_file

from lora_moe_rl.adapters.families import ModelShape, hf_path
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig, TrainerConfig
from lora_moe_rl.errors import RefitError
from lora_moe_rl.files.jsonl import read_jsonl
from lora_moe_rl.refit.parts import SentPart
from lora_moe_rl.refit.plan import EngineLayout
from lora_moe_rl.refit.sender import Sender
from lora_moe_rl.rollout.facts import slot_rank
from lora_moe_rl.tiny.tokenizer import make_tokenizer
from lora_moe_rl.verify.engine import EngineProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
LENGTHS = (9, 40)
Tensors = dict[str, np.ndarray]


@dataclass
class Serving:
    """A merged engine of a tiny model, and its trainer ranks, tp 2."""

    engine: EngineProcess
    config: RunConfig
    spec: AdapterSpec
    folder: Path
    senders: list[Sender] = field(default_factory=list)

    def adapter(self, seed: int, size: float = 0.03) -> Tensors:
        generator = np.random.default_rng(seed)
        tensors = {}
        for name, shape in self.spec.tensor_shapes.items():
            scale = shape[-1] ** -0.5 if name.endswith("A") else size
            tensors[name] = scale * generator.standard_normal(shape, dtype=np.float32)
        return tensors

    def send(self, version: int, tensors: Tensors) -> list[SentPart]:
        layouts = make_layouts(
            self.spec,
            self.config.trainer,
            EngineLayout.of(self.config.rollout, slot_rank(self.spec), merged=True),
        )
        if not self.senders:
            self.engine.ask("prepare_refit", layouts)
        self.senders = make_senders(layouts, self.spec, tensors, self.config.trainer)
        return [sender.send(version) for sender in self.senders]

    def publish(self, version: int, tensors: Tensors):
        return self.engine.ask("publish", version, *self.send(version, tensors))

    def score(self, version: int | None) -> list[np.ndarray]:
        return score(self.engine, version)


def score(engine: EngineProcess, version: int | None) -> list[np.ndarray]:
    """One sequence at a time: rounding depends on what shares a batch."""
    generator = np.random.default_rng(7)
    found = []
    for length in LENGTHS:
        ids = generator.integers(3, tiny_families.VOCAB_SIZE, length).tolist()
        (logprobs,), _ = engine.ask("score", [ids], version)
        found.append(logprobs)
    return found


@contextlib.contextmanager
def serving(
    name: str,
    folder: Path,
    targets: tuple[str, ...],
    tp: int,
    sizes=None,
    ep: bool = False,
    **adapter,
) -> Iterator[Serving]:
    model_dir = folder / "base"
    tiny_families.save(name, model_dir, **sizes or {})
    make_tokenizer().save_pretrained(model_dir)
    config = RunConfig(
        model={"path": str(model_dir), "max_length": 128},
        adapter={"rank": 6, "expert_rank": 4, "alpha": 12, "targets": targets, **adapter},
        trainer=TrainerConfig(world_size=2, tp=2),
        rollout={"tp": tp, "ep": ep, "max_response_tokens": 64},
        refit={"mode": "merged", "timeout_s": 60},
    )
    shape = ModelShape.from_hf_config(json.loads((model_dir / "config.json").read_text()))
    spec = AdapterSpec.build(shape, config.adapter, servable=False)
    with EngineProcess(config, spec, model_dir, folder / "engine.log") as engine:
        engine.start()
        yield Serving(engine, config, spec, folder)


def merge_by_hand(serving: Serving, tensors: Tensors) -> Path:
    """The base with `W + B' A` in place of each adapted weight, where B' is the scaled B."""
    base, merged = serving.folder / "base", serving.folder / "merged"
    shutil.copytree(base, merged)
    weights = load_file(base / "model.safetensors")
    for site in serving.spec:
        A, B = (torch.from_numpy(tensors[f"{site.name}.{m}"]) for m in "AB")
        for expert in range(site.num_experts or 1):
            path = hf_path(serving.spec.shape, site.module).format(expert)
            a, b = (x[expert] if x.dim() == 3 else x for x in (A, B))
            name = f"model.layers.{site.layer}.{path}.weight"
            weights[name] = weights[name].addmm(b * site.scale, a)
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    return merged


def check_equals_a_restart(serving: Serving, found: list[np.ndarray], tensors: Tensors) -> None:
    merged = merge_by_hand(serving, tensors)
    log = serving.folder / "restart.log"
    with EngineProcess(serving.config, serving.spec, merged, log) as restarted:
        restarted.start()
        expected = score(restarted, None)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def changes(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return all(np.abs(x - y).max() > 1e-2 for x, y in zip(a, b, strict=True))


def by_hugging_face(folder: Path) -> list[np.ndarray]:
    """What `score` gives, of the weights in `folder`."""
    model, generator = hf.load(folder), np.random.default_rng(7)
    drawn = [generator.integers(3, tiny_families.VOCAB_SIZE, length) for length in LENGTHS]
    return [hf.logprobs(model, ids.tolist()) for ids in drawn]


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory) -> Iterator[Serving]:
    """kv_b_proj adapted too, and all experts' outer tensors shared."""
    folder = tmp_path_factory.mktemp("deepseek")
    targets = ("*", "kv_b_proj")
    with serving("deepseek_v3", folder, targets, tp=1, expert_layout="shared_outer") as running:
        yield running


def test_deepseek_with_kv_b_proj_equals_a_restart(deepseek):
    base = deepseek.score(None)
    first = deepseek.publish(1, deepseek.adapter(1))
    after_one = deepseek.score(1)
    tensors = deepseek.adapter(2)
    second = deepseek.publish(2, tensors)
    found = deepseek.score(2)
    assert changes(base, after_one) and changes(after_one, found)
    assert deepseek.engine.ask("differing", 2, *deepseek.send(2, tensors)) == []
    assert first.bytes == second.bytes and first.checksum != second.checksum
    assert {"stage", "wait", "commit"} <= set(second.seconds)
    with pytest.raises(RefitError, match="asked for adapter version 1, but serves \\[2\\]"):
        deepseek.score(1)
    with pytest.raises(RefitError, match="asked for the base, but its weights are merged"):
        deepseek.score(None)
    check_equals_a_restart(deepseek, found, tensors)


def test_nothing_is_touched_before_all_is_checked(deepseek):
    before, newest = deepseek.score(2), 2
    sent = deepseek.send(3, deepseek.adapter(3))
    deepseek.senders[0].buffer[5] ^= 1
    with pytest.raises(RefitError, match="the checksum of .* differs"):
        deepseek.engine.ask("publish", 3, *sent)
    sent = deepseek.send(3, deepseek.adapter(3))
    sender = deepseek.senders[1]
    entry = sender.layout.entries[-1]
    box = sender.buffer[entry.offset : entry.offset + entry.nbytes("float32")]
    box.view(np.float32)[-1] = np.nan
    sums = (*sent[1].checksums[:-1], xxhash.xxh3_64_intdigest(box))
    with pytest.raises(RefitError, match=rf"{entry.tensor} arrived with NaN"):
        deepseek.engine.ask("publish", 3, sent[0], replace(sent[1], checksums=sums))
    with pytest.raises(RefitError, match="trainer ranks \\[1\\] are missing"):
        deepseek.engine.ask("publish", 3, sent[0])
    with pytest.raises(RefitError, match="versions only grow"):
        deepseek.publish(newest, deepseek.adapter(3))
    for ours, theirs in zip(deepseek.score(2), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_an_engine_whose_refit_failed_halfway_serves_nothing_until_a_whole_one(deepseek):
    tensors = deepseek.adapter(4)
    last = [name for name in tensors if ".experts.down." in name]
    broken = tensors | {name: np.full_like(tensors[name], 1e30) for name in last}
    with pytest.raises(RefitError, match=r"experts.0.down_proj: .*overflows torch.float32"):
        deepseek.publish(4, broken)
    for version in (2, 4, None):
        with pytest.raises(RefitError, match=r"serves nothing: .*version 4 failed halfway.*resume"):
            deepseek.score(version)
    deepseek.publish(5, deepseek.adapter(2))
    found = deepseek.score(5)
    deepseek.publish(6, deepseek.adapter(4))
    deepseek.publish(7, deepseek.adapter(2))
    for ours, theirs in zip(deepseek.score(7), found, strict=True):
        np.testing.assert_array_equal(ours, theirs)  # nothing is left of what was in between


def test_a_base_that_changed_on_disk_is_refused(deepseek):
    tensors = deepseek.adapter(8)
    (deepseek.folder / "base" / "model.safetensors").touch()
    with pytest.raises(RefitError, match="model.safetensors has changed since the engine started"):
        deepseek.publish(8, tensors)


MANY_EXPERTS = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 64}
EXPERT_BYTES = 3 * 256 * 256 * 4
WORKER_STACK_BYTES = 64 * EXPERT_BYTES // 2  # of one layer, in one of two workers


def test_qwen_over_two_engine_ranks_equals_a_restart(tmp_path):
    with serving("qwen3_moe", tmp_path, ("*",), tp=2, sizes=MANY_EXPERTS) as qwen:
        base = qwen.score(None)
        qwen.publish(1, qwen.adapter(1))
        tensors = qwen.adapter(2)
        with peak_memory(qwen.engine) as rise:
            receipt = qwen.publish(2, tensors)
        found = qwen.score(2)
        assert changes(base, found)
        assert qwen.engine.ask("differing", 2, *qwen.send(2, tensors)) == []
    print(f"{max(rise):,} bytes above {receipt.bytes:,} of the adapter; {receipt.seconds}")
    allowed = 2 * receipt.bytes + 8 * EXPERT_BYTES
    assert max(rise) < allowed < WORKER_STACK_BYTES
    check_equals_a_restart(qwen, found, tensors)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe"])
def test_linear_attention_over_two_engine_ranks_equals_a_restart(family, tmp_path):
    """Of Qwen3.5-MoE one linear is three of vLLM's partitions: queries, keys and values."""
    with serving(family, tmp_path, ("*",), tp=2) as served:
        base = served.score(None)
        served.publish(1, served.adapter(1))
        tensors = served.adapter(2)
        served.publish(2, tensors)
        found = served.score(2)
        assert changes(base, found)
        assert served.engine.ask("differing", 2, *served.send(2, tensors)) == []
        other = tensors | {"layers.0.out_proj.B": tensors["layers.0.out_proj.B"] + 1e-3}
        assert served.engine.ask("differing", 2, *served.send(2, other)) != []
    check_equals_a_restart(served, found, tensors)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "qwen3_next"])
def test_an_engine_whose_ranks_share_the_experts_out_serves_the_merged_weights(family, tmp_path):
    """An engine that was started on the same files would be wrong in the same way."""
    with serving(family, tmp_path, ("*",), tp=2, ep=True) as served:
        base = served.score(None)
        served.publish(1, served.adapter(1))
        tensors = served.adapter(2)
        served.publish(2, tensors)
        found = served.score(2)
        assert changes(base, found)
        assert served.engine.ask("differing", 2, *served.send(2, tensors)) == []
        other = tensors | {
            name: value + 1e-3 for name, value in tensors.items() if ".experts.up.B" in name
        }
        assert served.engine.ask("differing", 2, *served.send(2, other)) != []
    merged = merge_by_hand(served, tensors)
    for ours, folder in ((base, tmp_path / "base"), (found, merged)):
        for mine, theirs in zip(ours, by_hugging_face(folder), strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-5, rtol=0)


@contextlib.contextmanager
def peak_memory(engine: EngineProcess) -> Iterator[list[int]]:
    """How far the memory of vLLM's processes rises above what it was, in bytes of each."""
    processes = psutil.Process(engine.pid).children(recursive=True)
    assert len(processes) >= 2
    for process in processes:
        Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # the peak begins anew
    before = [process.memory_info().rss for process in processes]
    rise: list[int] = []
    yield rise
    for process, start in zip(processes, before, strict=True):
        status = Path(f"/proc/{process.pid}/status").read_text()
        peak = 1024 * int(re.search(r"VmHWM:\s+(\d+)", status)[1])
        rise.append(peak - start)


def test_a_run_serves_merged_weights(tmp_path):
    """The proof holds in every step, with an adapter that vLLM could not serve."""
    folder = tmp_path / "run"
    run = CliRun(
        *("train", RECIPE, "model=deepseek_v3", "refit.mode=merged", "trainer.steps=2"),
        *('adapter.targets=["o_proj","kv_b_proj","experts.*"]', "trainer.lr=0.01"),
        f"logging.run_dir={folder}",
        output=tmp_path / "run.out",
    )
    try:
        assert run.finish() == 0, run.output
        assert run.leftovers() == []
    finally:
        run.end()
    records = list(read_jsonl(folder / "metrics.jsonl"))
    assert [record["adapter/version"] for record in records] == [0, 1]
    for record in records:
        assert record["refit/max_diff"] < 1e-4 and record["refit/bytes"] > 0
        assert record["mismatch/max_abs_logprob_diff"] < 1e-4
