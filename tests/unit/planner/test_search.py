"""What a search of layouts tries: all that is worth it, with what was given of a layout."""

import pytest

from lora_moe_rl import cli
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.planner import hardware, layouts, published
from lora_moe_rl.planner import search as searches
from lora_moe_rl.planner.changes import search_of
from lora_moe_rl.planner.compute import Lengths
from lora_moe_rl.planner.facts import find
from lora_moe_rl.planner.hardware import GIB, Hardware
from lora_moe_rl.planner.plan import Assumed, make
from lora_moe_rl.planner.request import read
from lora_moe_rl.planner.search import MARGIN, Search

QWEN = ("--model", "qwen3-30b-a3b", "--gpus", "8")


def best(*words: str, count: int = 8):
    return search_of(read(words)).best(count)


def config_of(**sections) -> RunConfig:
    return RunConfig.model_validate({"model": {"max_length": 4096}} | sections)


SPLIT, COLOCATED = "placement.mode=split", "placement.mode=colocated"


@pytest.mark.parametrize(
    ("mode", "setting"),
    [
        *((mode, "trainer.tp=4") for mode in (SPLIT, COLOCATED)),
        *((mode, "trainer.ep=4") for mode in (SPLIT, COLOCATED)),
        *((mode, "trainer.recompute=full") for mode in (SPLIT, COLOCATED)),
        *((mode, "rollout.tp=4") for mode in (SPLIT, COLOCATED)),
        *((mode, "rollout.engines=4") for mode in (SPLIT, COLOCATED)),
        *((mode, "rollout.ep=true") for mode in (SPLIT, COLOCATED)),
        *((mode, "rollout.ep=false") for mode in (SPLIT, COLOCATED)),
        *((mode, "rollout.fully_sharded=true") for mode in (SPLIT, COLOCATED)),
        *((SPLIT, "trainer.pp=3"), (COLOCATED, "trainer.pp=4"), (SPLIT, "rollout.engines=1")),
        (SPLIT, "rollout.gpu_memory_utilization=0.8"),
        (COLOCATED, "rollout.gpu_memory_utilization=0.5"),
    ],
)
def test_what_is_given_of_a_layout_is_kept(mode, setting):
    section, key = setting.partition("=")[0].split(".")
    request = read([*QWEN, mode, setting])
    wanted = getattr(getattr(request.config, section), key)
    found = search_of(request).best(8)
    assert found
    for one in found:
        assert getattr(getattr(one.config, section), key) == wanted
        assert make(request.facts, one.config, request.assumed).problems == []


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("trainer.vpp=2", "trainer.vpp=2 is of a whole layout"),
        ("rollout.dp=2", "rollout.dp=2 is of a whole layout"),
        ("trainer.gpus_per_rank=0.5", "is of a whole layout, and a search chooses it"),
        ("model.held_once=on", "no layouts of a base that is held once are looked for"),
        ("trainer.etp=2", "trainer.etp=2 is of a whole layout"),
        ("rollout.tp=3", "rollout.tp=3 does not divide the model's 32 attention heads; use a "),
        ("trainer.tp=3", "trainer.tp=3 does not divide the model's 32 attention heads; use a "),
    ],
)
def test_what_no_search_can_keep_is_refused_by_its_name(setting, said):
    with pytest.raises(ConfigError) as told:
        read([*QWEN, COLOCATED, setting])
    assert said in str(told.value) and "trainer ranks" not in str(told.value)


def test_nearest_layouts_are_of_a_trainer_that_does_not_divide():
    whole = ("--model", "qwen3-30b-a3b", "trainer.world_size=2", "trainer.tp=2")
    with pytest.raises(ConfigError, match="attention heads; use a divisor of 32$"):
        read([*whole, "rollout.tp=3"])
    with pytest.raises(ConfigError, match="the nearest layouts of 6 trainer ranks"):
        read([*whole, "trainer.world_size=6", "trainer.tp=3"])


@pytest.mark.parametrize(
    ("model", "gpu", "gpus"),
    [
        *(("qwen3-235b-a22b", "h100", n) for n in (48, 56, 72)),
        ("glm-4.5", "h100", 56),
        pytest.param("kimi-k2", "h200", 112, marks=pytest.mark.slow),
        pytest.param("qwen3-30b-a3b", "h100", 100, marks=pytest.mark.slow),
    ],
)
def test_no_split_that_is_left_out_is_faster(model, gpu, gpus, monkeypatch):
    words = ("--model", model, "--gpu", gpu, "--gpus", str(gpus))
    (found,) = best(*words, count=1)
    monkeypatch.setattr(searches, "splits", lambda total, node: range(1, total))
    (of_all,) = best(*words, count=1)
    assert found.seconds.step <= of_all.seconds.step


def test_splits_of_many_gpus_are_whole_nodes_and_few():
    assert layouts.splits(64, 8) == range(1, 64)
    assert layouts.splits(112, 8) == range(8, 112, 8)
    for gpus in (512, 513, 4096, 65_536):
        tried = layouts.splits(gpus, 8)
        assert tried.step % 8 == 0 and len(tried) <= layouts.EVERY_SPLIT


@pytest.mark.parametrize(
    "setting", ["rollout.tp=4", "rollout.tp=2", "rollout.ep=false", "rollout.fully_sharded=true"]
)
def test_what_is_kept_is_kept_of_engines_beside_trainer_ranks_too(setting):
    """On few large GPUs the fastest layout shares each with a trainer rank."""
    words = ("--model", "qwen3-8b", "--gpus", "8", "--gpu", "b200")
    assert best(*words)[0].shared
    section, key = setting.partition("=")[0].split(".")
    request = read([*words, setting])
    for one in search_of(request).best(8):
        found = getattr(getattr(one.config, section), key)
        assert found == getattr(getattr(request.config, section), key)
        assert not (one.config.rollout.fully_sharded and one.config.rollout.tp == 1)


def test_large_nodes_are_split_too():
    assert layouts.splits(72, 72) == range(8, 72, 8)
    assert len(layouts.splits(144, 72)) == 17


def test_gpus_that_make_no_layout_faster_stay_idle(capsys):
    words = ("--model", "qwen3-235b-a22b", "--gpus")
    (even,), (odd,) = best(*words, "24", count=1), best(*words, "25", count=1)
    assert odd.seconds.step == even.seconds.step and odd.gpus == 24
    assert layouts.totals(30, 8) == [30, 28, 24] and layouts.totals(5, 8) == [5, 4]
    assert layouts.totals(25, 6) == [25, 24]
    assert cli.main(["plan", *words, "17"]) == 0
    assert "17 GPUs (h100, 79 GiB): 8 trainer + 8 engines, 1 idle" in capsys.readouterr().out


@pytest.mark.parametrize("rank", [128, 256, 512])
@pytest.mark.parametrize("mode", [SPLIT, COLOCATED])
def test_engines_take_slots_of_the_adapters_rank(rank, mode):
    """vLLM's kernels take experts' slots of up to 128, unless they are cut in all dimensions."""
    words = ["--model", "qwen3-30b-a3b", "--gpus", "16", "--gpu", "h200", "--rank", str(rank)]
    request = read([*words, mode, "trainer.offload=optimizer"])
    found = search_of(request).best(3)
    assert found
    for one in found:
        assert make(request.facts, one.config, request.assumed).problems == []
        assert one.config.rollout.fully_sharded == (rank > 128)


def test_where_no_engine_serves_the_rank_that_is_said(capsys):
    words = ["plan", *QWEN, "--rank", "256", "rollout.ep=true"]
    assert cli.main(words) == 1
    shown = capsys.readouterr().out
    assert "no engine of up to 8 GPUs serves these adapters: adapters of rank 256" in shown


def test_sentences_count_memory_as_the_table_does(capsys):
    assert cli.main(["plan", *QWEN, "--search"]) == 0
    shown = capsys.readouterr().out.replace("\n", " ")
    row = shown.split("stage 0")[1].split()
    assert "32.08" in row and "with activations of 32.1;" in shown


def test_a_gpu_has_no_more_memory_than_its_driver_gives():
    """An H100 of "80 GB" has 81,559 MiB by nvidia-smi, an H200 143,771, before the driver's own."""
    assert hardware.GPUS["h100"].memory <= 79.1 < 81559 / 1024
    assert hardware.GPUS["h200"].memory <= 139.8 < 143771 / 1024
    assert hardware.GPUS["a100"].memory <= 79.1


def test_engines_over_several_nodes_are_searched_for_where_none_fits_on_one():
    facts = find("kimi-k2")
    config = config_of(rollout={"gpu_memory_utilization": 0.9}, trainer={"recompute": "full"})
    for memory, spread in ((80, True), (179, False)):
        hardware = Hardware(96, gpu_memory=memory)
        assumed = Assumed(hardware, "bf16", "fp8", Lengths(512, 512))
        found = Search(facts, config, assumed).best(4)
        assert found
        for one in found:
            rollout = one.config.rollout
            assert (rollout.nodes > 1) == (rollout.dp > 1) == spread
            assert rollout.ranks // rollout.nodes <= 8
            if spread:
                assert one.settings["rollout.nodes"] * 8 == one.settings["rollout.dp"]
            assert make(facts, one.config, assumed).problems == []


def test_the_search_proposes_what_fits():
    facts = find("qwen3-30b-a3b")
    config = config_of(rollout={"gpu_memory_utilization": 0.9})
    assumed = Assumed(Hardware(8), "bf16", "bf16", Lengths(512, 512))
    proposals = Search(facts, config, assumed).best(5)
    assert len(proposals) > 1
    assert [p.seconds.step for p in proposals] == sorted(p.seconds.step for p in proposals)
    for proposal in proposals:
        result = make(facts, RunConfig.model_validate(proposal.config.model_dump()), assumed)
        assert result.problems == []
        assert result.heaviest.total <= 0.85 * 80 * GIB


def test_what_a_proposal_leaves_free_is_what_the_plan_was_short_of():
    memory = [row for row in published.rows() if row.what.endswith(("GB", "GiB"))]
    assert len(memory) == 2
    for row in memory:
        assert row.predicted / row.published >= 1 - MARGIN


def test_gpus_are_shared_whatever_share_an_engine_of_its_own_would_get():
    facts = find("moonlight-16b-a3b")
    assumed = Assumed(Hardware(1, "h200"), "bf16", "bf16", Lengths(512, 512))
    config = config_of(rollout={"gpu_memory_utilization": 0.05})
    assert [p.shared for p in Search(facts, config, assumed).best(2)] == [True]


def test_a_dense_model_gets_no_engines_that_cut_experts():
    facts = find("qwen3-8b")
    assumed = Assumed(Hardware(8), "bf16", "bf16", Lengths(512, 512))
    search = Search(facts, config_of(), assumed)
    assert not any(rollout.ep for rollout, _ in search.engines())
    for proposal in search.best(8):
        assert make(facts, proposal.config, assumed).problems == []
