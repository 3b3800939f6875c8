"""What `lora-moe-rl eval` is given: a run, a checkpoint, a recipe; and what it cannot be."""

from __future__ import annotations

import pytest
from checkpoints import write_checkpoint

from lora_moe_rl import cli
from lora_moe_rl.config import AdapterConfig, RunConfig
from lora_moe_rl.config.files import to_yaml
from lora_moe_rl.config.overrides import override
from lora_moe_rl.config.recipes import load_config
from lora_moe_rl.errors import ConfigError, RunDirError
from lora_moe_rl.run.eval_target import read_target


@pytest.fixture
def run(tmp_path):
    """A run directory with checkpoints of steps 2 and 4, whose run was told to wandb."""
    folder = tmp_path / "mine"
    settings = ["tracker=wandb", "tracker.project=p", "eval.sets.sums.path=/s.jsonl"]
    config = override(RunConfig(), [f"logging.run_dir={folder}", *settings])
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(config))
    for step in (2, 4):
        metadata = {"step": step, "adapter": AdapterConfig(rank=step).model_dump(mode="json")}
        with write_checkpoint(folder / "checkpoints", step, 2, metadata, ()) as directory:
            (directory / "file").write_text("x")
    return folder


def test_a_run_is_its_newest_checkpoint_in_a_directory_of_its_own(run):
    config, path = read_target(str(run), ["eval.sets.sums.samples=8"])
    assert path == run / "checkpoints/step-000004" and config.eval.sets["sums"].samples == 8
    assert config.run_dir == run.with_name("mine-eval-step-000004")
    assert config.tracker.name == "none"


def test_a_checkpoint_is_named_by_its_directory(run):
    config, path = read_target(str(run / "checkpoints/step-000002"), ["logging.run_dir=/else"])
    assert path == run / "checkpoints/step-000002" and str(config.run_dir) == "/else"


def test_a_checkpoint_is_evaluated_at_its_own_ranks(run):
    """Whatever the run was resized to since."""
    file = run / "config.yaml"
    later = override(load_config(str(file)), ["adapter.rank=1", "adapter.resize=true"])
    file.write_text(to_yaml(later))
    for target, rank in ((run, 4), (run / "checkpoints/step-000002", 2)):
        adapter = read_target(str(target), [])[0].adapter
        assert (adapter.rank, adapter.resize) == (rank, False)
    asked = ["adapter.rank=1", "adapter.resize=true"]
    adapter = read_target(str(run), asked)[0].adapter
    assert (adapter.rank, adapter.resize) == (1, True)


def test_where_an_adapter_began_is_as_the_run_has_it_now(run):
    """A checkpoint has the place as it was then."""
    file = run / "config.yaml"
    file.write_text(to_yaml(override(load_config(str(file)), ["adapter.init_from=/moved"])))
    assert read_target(str(run), [])[0].adapter.init_from == "/moved"


def test_a_checkpoint_that_is_damaged_is_passed_over_and_named(run, capsys):
    (run / "checkpoints/step-000004/file").write_text("y")
    assert read_target(str(run), [])[1] == run / "checkpoints/step-000002"
    said = " ".join(capsys.readouterr().err.split())
    assert "step-000004: file is corrupt" in said and "skipped" in said


def test_a_second_evaluation_needs_a_directory_of_its_own(run):
    config, _ = read_target(str(run), [])
    config.run_dir.mkdir()
    (config.run_dir / "config.yaml").write_text(to_yaml(config))
    (config.run_dir / "metrics.jsonl").write_text('{"step": 4, "eval/step": 4}\n')
    with pytest.raises(RunDirError, match="step-000004 holds an evaluation.*logging.run_dir=DIR"):
        read_target(str(run), [])
    assert read_target(str(run), ["logging.run_dir=/else"])[1] is not None


def test_a_recipe_has_no_checkpoint(run):
    config, path = read_target(str(run / "config.yaml"), [])
    assert path is None and config.run_dir == run.with_name("mine-eval")


def test_what_cannot_be_evaluated(run, tmp_path):
    with pytest.raises(ConfigError, match="has no eval.sets: name held-out data"):
        read_target(str(run), ["eval.sets=null"])
    with pytest.raises(RunDirError, match="no config.yaml.*adapter.init_from=DIR.*model=DIR"):
        read_target(str(tmp_path), [])
    for path in (run / "checkpoints").iterdir():
        (path / "manifest.json").unlink()
        (path / "file").unlink()
        path.rmdir()
    with pytest.raises(RunDirError, match="mine has no checkpoint to evaluate"):
        read_target(str(run), [])


def test_the_command_line_tells_of_it(capsys):
    assert cli.main(["eval", "--help"]) == 0
    assert "eval [RUN | CHECKPOINT | RECIPE]" in capsys.readouterr().out
