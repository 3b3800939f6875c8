"""The planner: published figures, sums over ranks, traffic, problems, bad input."""

from collections import Counter

import pytest

from lora_moe_rl import cli
from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig, TrainerConfig
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.kernels import packed_linear
from lora_moe_rl.planner import published
from lora_moe_rl.planner.base import base_tensors, held_by, num_parameters
from lora_moe_rl.planner.build import adapter_boxes
from lora_moe_rl.planner.compute import Lengths, flops
from lora_moe_rl.planner.facts import find, known
from lora_moe_rl.planner.formats import SCRATCH_BYTES, scratch_bytes, tensor_bytes, trainer_bytes
from lora_moe_rl.planner.hardware import Hardware
from lora_moe_rl.planner.plan import Assumed, make
from lora_moe_rl.planner.rollout import slot_bytes, weight_bytes
from lora_moe_rl.planner.search import Search
from lora_moe_rl.planner.traffic import routes
from lora_moe_rl.planner.trainer import TrainerMemory, in_flight, stage_layers
from lora_moe_rl.refit.parts import part_layouts
from lora_moe_rl.refit.plan import EngineLayout, make_plan, trainer_ranks
from lora_moe_rl.rollout.facts import slot_rank

NAMES = [entry["name"] for entry in known().values() if not entry["name"].startswith("tiny")]


def config_of(**sections) -> RunConfig:
    return RunConfig.model_validate({"model": {"max_length": 4096}} | sections)


@pytest.mark.parametrize("row", published.rows(), ids=lambda row: row.what)
def test_published_figures(row):
    assert row.passed, f"{row.predicted:,} planned, {row.published:,} published"


@pytest.mark.parametrize("name", NAMES)
def test_ranks_hold_the_whole_model_once(name):
    """Over the ranks of a layout with TP, PP, EP and ETP: each element as often as it is copied."""
    facts = find(name)
    trainer = TrainerConfig(world_size=16, tp=2, pp=2, ep=2, etp=2)
    found = Counter()
    for rank in trainer_ranks(trainer, facts.shape.num_layers):
        for tensor, box in held_by(facts, rank).items():
            found[tensor] += box.size
    for tensor in base_tensors(facts):
        cut = 1
        for _, axis in tensor.split:
            cut *= {"tp": 2, "ep": 2, "etp": 2}[axis]
        assert found[tensor] == tensor.size * 8 // cut, tensor.name


def test_a_policy_that_teaches_itself_has_every_sample_scored_behind_a_solution():
    """Of each prompt 8 samples, of which each is scored with prompt and solution, or with feedback,
    whose length nobody knows; a prompt is prefilled once for its samples."""

    def parts(**algorithm):
        config = config_of(algorithm={"group_size": 8} | algorithm)
        assumed = Assumed(Hardware(8), "bf16", "bf16", Lengths(512, 256))
        return make(find("qwen3-30b-a3b"), config, assumed).seconds.parts

    own, hinted = parts(name="sdpo"), parts(name="sdpo", success_reward=None, feedback_key="hint")
    assert "scoring" not in parts()
    assert own["scoring"] == pytest.approx(own["prefill"] * 8 * (512 + 2 * 256) / 512)
    assert hinted["scoring"] == pytest.approx(own["prefill"] * 8 * (512 + 256) / 512)


def test_a_greedy_sample_is_one_more_of_each_prompt_to_engines_and_none_to_trainers():
    def seconds(size: int, advantage: str = "rloo"):
        config = config_of(algorithm={"group_size": size, "advantage": advantage})
        lengths = Lengths(512, 512)
        return make(
            find("qwen3-30b-a3b"), config, Assumed(Hardware(8), "bf16", "bf16", lengths)
        ).seconds

    greedy, same, more = seconds(7, "remax"), seconds(7), seconds(8)
    assert greedy.rollout == more.rollout > same.rollout
    assert greedy.train == same.train < more.train


@pytest.mark.parametrize(
    ("model", "adapter"),
    [
        ("kimi-k2", {"rank_pattern": {"layers.9.*": 8}}),
        ("qwen3-next-80b-a3b", {"targets": ["experts.*"]}),  # of two kinds of attention
    ],
)
def test_classes_are_the_sums_of_their_tensors(model, adapter):
    facts = find(model)
    config = config_of(trainer={"world_size": 48, "tp": 8, "pp": 6, "ep": 8}, adapter=adapter)
    spec = AdapterSpec.build(facts.shape, config.adapter)
    classes = TrainerMemory(facts, spec, "bf16").classes(config)
    ranks = trainer_ranks(config.trainer, facts.shape.num_layers)
    assert sum(c.ranks for c in classes) == 48
    for c in classes:
        for stage in c.stages:
            rank = ranks[stage * 8 + 3]
            held = [(t, b) for t, b in held_by(facts, rank).items() if not t.buffer]
            assert c.base_parameters == sum(box.size for _, box in held)
            for form in ("bf16", "fp8", "int4", "mxfp4"):
                bytes_held = sum(trainer_bytes(t, b.shape, form, config.trainer) for t, b in held)
                assert c.base_bytes[form] == bytes_held
            adapters = sum(b.size for boxes in adapter_boxes(spec, rank).values() for b in boxes)
            assert c.adapter_parameters == c.trained_parameters == adapters


@pytest.mark.parametrize("transport", ["cuda_ipc", "nixl"])
def test_a_version_that_stays_on_the_trainers_gpu_is_counted_there(transport):
    facts = find("qwen3-30b-a3b")
    trainer = {"world_size": 8, "pp": 2, "ep": 4}
    stays, goes = (
        config_of(trainer=trainer, refit={"transport": name}) for name in (transport, "shm")
    )
    spec = AdapterSpec.build(facts.shape, stays.adapter)
    memory = TrainerMemory(facts, spec, "bf16")
    engine = EngineLayout(slot_rank(spec), tp=2)
    layouts = part_layouts(make_plan(spec, stays.trainer, engine, 2), spec, "bfloat16")
    largest = max(layout.nbytes for layout in layouts)
    counted = max(rank.memory["refit"] for rank in memory.classes(stays))
    assert 0.9 * counted < largest <= counted
    for on_gpu, on_host in zip(memory.classes(stays), memory.classes(goes), strict=True):
        assert (
            on_gpu.total - on_host.total
            == on_gpu.memory["refit"]
            == on_gpu.resident - (on_host.resident)
        )


def test_an_entropy_bonus_keeps_a_hidden_state_more_of_each_token_on_the_last_stage():
    facts = find("qwen3-30b-a3b")
    trainer = {"world_size": 2, "pp": 2, "micro_batch_tokens": 8192}
    plans = []
    for coef in (0.0, 0.01):
        config = config_of(trainer=trainer, algorithm={"entropy_coef": coef})
        spec = AdapterSpec.build(facts.shape, config.adapter)
        classes = TrainerMemory(facts, spec, "bf16").classes(config)
        plans.append({one.stages: one.memory["logits"] for one in classes})
    without, with_bonus = plans
    more = {stages: with_bonus[stages] - without[stages] for stages in without}
    assert more == {(0,): 0, (1,): 8192 * 2048 * 2}  # tokens, hidden size, bytes in bfloat16


def test_a_divergence_from_a_teacher_keeps_a_hidden_state_more_and_logits_once_more():
    facts = find("qwen3-30b-a3b")
    plans = []
    for algorithm in ("opd", "distillation"):
        config = config_of(trainer={"micro_batch_tokens": 8192}, algorithm={"name": algorithm})
        spec = AdapterSpec.build(facts.shape, config.adapter)
        (one,) = TrainerMemory(facts, spec, "bf16").classes(config)
        plans.append(one.memory["logits"])
    without, with_divergence = plans
    rows = 2**25 // 151936  # of logits at a time
    assert with_divergence - without == 8192 * 2048 * 2 + rows * 151936 * 4


def test_int4_experts_are_held_as_they_are_and_dequantised_in_a_buffer():
    facts = find("kimi-k2")
    config = config_of(trainer={"world_size": 8, "tp": 8, "ep": 8})
    spec = AdapterSpec.build(facts.shape, config.adapter)
    (packed,) = TrainerMemory(facts, spec, "int4").classes(config)
    (plain,) = TrainerMemory(facts, spec, "bf16").classes(config)
    assert packed.memory["base"] == plain.base_bytes["int4"] < 0.4 * plain.memory["base"]
    # 48 experts of the rank: gate and up, and down.
    buffers = 48 * 2 * (4096 * 7168 + 7168 * 2048)
    assert packed.memory["scratch"] == buffers < 2 * SCRATCH_BYTES["cuda"]
    assert packed.resident - plain.resident == buffers - (
        plain.memory["base"] - packed.memory["base"]
    )
    assert plain.memory["scratch"] == 0
    # Of larger ones some at a time.
    most = SCRATCH_BYTES["cuda"] // 58_720_256 * 58_720_256
    assert scratch_bytes([(384, 4096, 7168)], "int4", "cuda") == most
    assert packed_linear.SCRATCH_BYTES == SCRATCH_BYTES


def test_on_gpus_the_experts_alone_of_an_fp8_checkpoint_are_packed():
    facts = find("deepseek-v3")
    config = config_of(trainer={"world_size": 8, "ep": 8, "device": "cuda"})
    spec = AdapterSpec.build(facts.shape, config.adapter)
    (rank,) = TrainerMemory(facts, spec, facts.in_trainer("bf16")).classes(config)
    experts = 58 * 256 * 3 * 7168 * 2048 // 8
    scales = 4 * experts // 128**2
    assert rank.memory["base"] == experts + scales + 2 * (rank.base_parameters - experts)


def test_checkpoints_in_fp8_have_their_published_numbers():
    """The hub's count of DeepSeek-V3: matrices in FP8, float32 scales and corrections, the rest."""
    facts = find("deepseek-v3")
    tensors = list(base_tensors(facts))
    linear = sum(t.size for t in tensors if t.linear)
    scales = sum(tensor_bytes(t, t.shape, "fp8") - t.size for t in tensors if t.linear) // 4
    # The hub counts the layer that predicts one token more, too: of its parts here.
    layer = [t for t in tensors if t.layer == 60]
    more = sum(t.size for t in layer if t.linear)
    more_scales = sum(tensor_bytes(t, t.shape, "fp8") - t.size for t in layer if t.linear) // 4
    assert linear + more == 680_571_043_840
    corrections = 59 * 256
    assert scales + more_scales + corrections == 41_555_600


def test_engine_weights_over_ranks_are_the_model():
    facts = find("qwen3-30b-a3b")
    whole = 2 * num_parameters(facts)
    assert weight_bytes(facts, 1, False, "bf16") == whole
    repeated = 2 * sum(t.size for t in base_tensors(facts) if not t.split)
    for ep in (False, True):
        assert 4 * weight_bytes(facts, 4, ep, "bf16") == whole + 3 * repeated
    # Eight ranks share four key/value heads, each of which two ranks then hold.
    doubled = 2 * 48 * 4 * 2 * 128 * 2048
    assert 8 * weight_bytes(facts, 8, True, "bf16") == whole + 7 * repeated + doubled


def test_engine_weights_over_data_parallel_ranks_are_the_model_with_all_but_experts_repeated():
    facts = find("qwen3-30b-a3b")
    whole = 2 * num_parameters(facts)
    repeated = 2 * sum(t.size for t in base_tensors(facts) if t.part != "experts")
    for dp in (2, 8, 16):
        assert dp * weight_bytes(facts, 1, True, "bf16", dp) == whole + (dp - 1) * repeated


def test_engines_that_would_cut_blocks_of_fp8_weights_are_neither_planned_nor_found():
    facts = find("qwen3-30b-a3b")
    for served, cut in (("fp8", True), ("bf16", False)):
        assumed = Assumed(Hardware(16, gpu_memory=80), "bf16", served, Lengths(512, 512))
        kinds = {(r.tp, r.ep) for r, _ in Search(facts, config_of(), assumed).engines()}
        assert ((4, False) not in kinds) == cut and {(2, False), (4, True)} <= kinds
        if cut:
            with pytest.raises(ConfigError, match="rollout.tp=4 cuts experts.gate"):
                make(facts, config_of(rollout={"tp": 4}), assumed)


def test_kimi_slots_are_as_computed_from_vllms_buffers():
    facts = find("kimi-k2")
    for rollout, gigabytes in (
        ({"tp": 16}, 32.3),
        ({"tp": 16, "ep": True}, 2.6),
        ({"tp": 16, "fully_sharded": True}, 2.6),
        ({"dp": 16, "ep": True}, 3.0),
    ):
        config = config_of(rollout=rollout, adapter={"rank": 32}, refit={"slots": 1})
        spec = AdapterSpec.build(facts.shape, config.adapter)
        assert slot_bytes(spec, config, 2) / 1e9 == pytest.approx(gigabytes, rel=0.06)


def test_slots_have_room_for_the_largest_rank():
    facts = find("qwen3-30b-a3b")
    sizes = []
    for rank in (9, 16):
        config = config_of(adapter={"rank": rank})
        sizes.append(slot_bytes(AdapterSpec.build(facts.shape, config.adapter), config, 2))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("name", NAMES)
def test_routes_are_those_of_the_codec(name):
    from lora_moe_rl.kernels.route_codec.layout import RowLayout

    shape = find(name).shape
    if not shape.moe_layers:
        assert routes(shape, 7).token == 0
        return
    layout = RowLayout(len(shape.moe_layers), shape.top_k, shape.num_experts)
    assert routes(shape, 7).token == layout.row_bytes
    assert routes(shape, 7).step == 7 * layout.row_bytes


def test_operations():
    facts = find("qwen3-30b-a3b")
    spec = AdapterSpec.build(facts.shape, config_of(adapter={"rank": 16}).adapter)
    f = flops(facts, spec, 0, "none")
    assert f.active / 1e9 == pytest.approx(3.35 - 0.31, abs=0.01)  # 3.3B with the embedding
    assert f.train == 4 * f.active + 6 * f.adapter
    assert f.full == 6 * f.active
    again = flops(facts, spec, 0, "full")
    assert again.train - f.train == f.forward
    assert f.adapter_share == pytest.approx(6 * f.adapter / (4 * f.active))


def test_stages_and_their_micro_batches_in_flight():
    trainer = TrainerConfig(world_size=4, pp=4)
    assert [in_flight(trainer, stage, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert [in_flight(trainer, stage, 2) for stage in range(4)] == [2, 2, 2, 1]
    interleaved = TrainerConfig(world_size=2, pp=2, vpp=2)
    assert [in_flight(interleaved, stage, 8) for stage in range(2)] == [5 / 2, 3 / 2]
    assert stage_layers(interleaved, 5) == [[0, 3], [1, 2, 4]]


def planned(model: str, gpus: int, **sections):
    facts = find(model)
    config = config_of(**sections)
    return make(facts, config, Assumed(Hardware(gpus), "bf16", "bf16", Lengths(512, 512)))


def test_what_does_not_fit_is_said_with_a_way_out():
    trainer = {"world_size": 8, "ep": 8}
    kept = planned("qwen3-235b-a22b", 16, trainer=trainer, rollout={"tp": 8})
    assert any("its activations" in text and "recompute=full" in text for text in kept.problems)
    trainer["recompute"] = "full"
    base = planned("qwen3-235b-a22b", 16, trainer=trainer, rollout={"tp": 8})
    assert any("its base" in text and "raise trainer.pp" in text for text in base.problems)
    few = planned("qwen3-30b-a3b", 2, trainer={"world_size": 2, "ep": 2}, rollout={"tp": 2})
    assert "needs 4 GPUs (trainer 2, engines 2) and there are 2" in few.problems[0]
    wide = planned("qwen3-30b-a3b", 32, rollout={"tp": 16})
    assert any("rollout.tp=16 ranks stand on one node" in text for text in wide.problems)
    spread = planned("qwen3-30b-a3b", 32, rollout={"dp": 16, "ep": True})
    assert any("raise rollout.nodes" in text for text in spread.problems)
    cache = planned("qwen3-30b-a3b", 2, rollout={"gpu_memory_utilization": 0.5})
    assert any("left for the KV cache" in text for text in cache.problems)
    trainer = {"world_size": 4, "ep": 4, "micro_batch_tokens": 4096}
    rollout = {"tp": 2, "engines": 2, "gpu_memory_utilization": 0.9}
    fits = planned("qwen3-30b-a3b", 8, trainer=trainer, rollout=rollout)
    assert fits.problems == []


def test_slots_that_vllms_kernels_do_not_take_do_not_fit(capsys):
    words = ["--model", "qwen3-30b-a3b", "--gpus", "8", "--gpu", "h200"]
    words += ["trainer.world_size=4", "trainer.ep=4", "rollout.engines=2", "rollout.tp=2"]
    words += ["rollout.ep=true", "adapter.expert_rank=8", "rollout.gpu_memory_utilization=0.9"]
    words += ["trainer.recompute=full"]
    assert cli.main(["plan", *words, "adapter.rank=128"]) == 0
    capsys.readouterr()
    assert cli.main(["plan", *words, "adapter.rank=129"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "adapters of rank 129 (layers.0.q_proj) have slots of rank 256" in said


def test_a_shared_gpu_must_hold_both():
    share = {"trainer": {"gpus_per_rank": 0.5, "recompute": "full"}}
    rollout = {"gpus_per_engine": 0.5, "gpu_memory_utilization": 0.6}
    both = planned("moonlight-16b-a3b", 1, **share, rollout=rollout)
    assert any("share a GPU of 79 GiB" in text for text in both.problems)
    assert both.gpus == (1, 1, True)


def test_an_engine_that_reads_parts_has_room_for_them_beside_vllms_share():
    full = {"gpu_memory_utilization": 0.999}
    reads = {"refit": {"transport": "nixl"}, "rollout": full}
    told = [one for one in planned("moonlight-16b-a3b", 8, **reads).problems if "reads" in one]
    assert "an engine rank reads a trainer rank's part" in told[0] and "to 0.9" in told[0]
    for other in ({"rollout": full}, {"refit": reads["refit"]}):
        assert not any("reads" in one for one in planned("moonlight-16b-a3b", 8, **other).problems)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_tiny_models_are_as_they_are_made(name):
    from lora_moe_rl.tiny.shapes import EXTRA_CONFIG, SHAPES

    facts = find(name)
    made = {k: v for k, v in (SHAPES[name] | EXTRA_CONFIG[name]).items() if k in facts.config}
    assert made == {key: facts.config[key] for key in made}
    assert facts.shape == ModelShape.from_hf_config(dict(facts.config) | SHAPES[name])


@pytest.mark.parametrize("layout", ["per_expert", "shared_outer"])
@pytest.mark.parametrize("cut", [{"tp": 4, "fully_sharded": True}, {"tp": 2, "ep": True}])
def test_a_slot_has_room_for_the_largest_rank_at_every_site(layout, cut):
    """Also where a smaller one fills no more than the first rank's part."""

    def slots(**experts) -> int:
        adapter = {"rank": 64, "expert_layout": layout, **experts}
        config = RunConfig(adapter=adapter, rollout=cut)
        spec = AdapterSpec.build(find("qwen3-30b-a3b").shape, config.adapter)
        return slot_bytes(spec, config, 1)

    assert slots(expert_rank=8) == slots(expert_rank=16) == slots(expert_rank=48) == slots()


@pytest.mark.parametrize(("cp", "keys"), [(2, 512), (8, 1024), (32, 4096)])
def test_what_context_parallel_ranks_exchange_counts_repeated_heads(cp, keys):
    """32 query heads and 4 of keys, 128 wide; in bf16 each of 48 layers sends queries, keys, values
    and what attention gives, forward and back, at 450 GB/s inside a node, 50 beyond, of it 70 %."""
    trainer = {"world_size": cp, "cp": cp, "recompute": "none", "micro_batch_tokens": 8192}
    config = config_of(trainer=trainer)
    lengths = Lengths(512, 512)
    plan = make(find("qwen3-30b-a3b"), config, Assumed(Hardware(cp + 8), "bf16", "bf16", lengths))
    sent = 2 * 48 * 8192 / cp * 2 * (2 * 4096 + 2 * keys) * (cp - 1) / cp
    samples = config.algorithm.prompts_per_step * config.algorithm.group_size
    micro_batches = -(-samples * 1024 // 8192)
    link = 450e9 if cp <= 8 else 50e9
    assert plan.seconds is not None
    found = plan.seconds.parts["communication"]
    assert found == pytest.approx(micro_batches * sent / (link * 0.7))
