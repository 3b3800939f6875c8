"""What each tracker has written, read back by its own library."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.files import to_yaml
from lora_moe_rl.config.overrides import override
from lora_moe_rl.config.plugins import TRACKERS
from lora_moe_rl.config.recipes import load_config, resolve
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.telemetry.details import Details
from lora_moe_rl.telemetry.metrics import FOLDER, MetricsWriter, read_metrics

SAMPLE = {"step": 1, "row": 0, "prompt": "2 + 2", "response": "4", "reward": 1.0, "advantage": 0.5}
DETAILS = Details([SAMPLE, SAMPLE | {"response": "5", "reward": 0.0}], {
    "histogram/reward": np.array([1.0, 0.0, 1.0, 1.0]),
})  # fmt: skip


def config_in(folder: Path, *arguments: str) -> RunConfig:
    return resolve(override(RunConfig(), [f"logging.run_dir={folder}", *arguments]))


def metrics_of(step: int) -> dict[str, float]:
    return {"step": step, "reward/mean": step / 4, "eval/aime/pass@8": math.nan}


def run_for(config: RunConfig, steps: range, resume: bool = False) -> RunDir:
    """A run's records of some steps, with an adapter at the last."""
    adapter = config.run_dir / "adapter"
    with RunDir(config, resume) as run_dir, MetricsWriter(run_dir, config) as metrics:
        for step in steps:
            metrics.write(metrics_of(step))
            metrics.details(step, DETAILS)
        adapter.mkdir(exist_ok=True)
        (adapter / "adapter_config.json").write_text(f'{{"r": {steps[-1]}}}')
        metrics.adapter(steps[-1], adapter)
    return run_dir


@pytest.fixture(autouse=True)
def _local(tmp_path, monkeypatch):
    """What libraries keep outside a run directory stays here."""
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def wandb_records(path: Path) -> list:
    """All records of a run that has ended: its last may still be on their way to the file, where
    half of one fails the reader's assertions."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    for _ in range(60):
        store, found = DataStore(), []
        with suppress(AssertionError):
            store.open_for_scan(str(path))
            while data := store.scan_data():
                found.append(Record())
                found[-1].ParseFromString(data)
        if any(one.WhichOneof("record_type") == "exit" for one in found):
            return found
        time.sleep(0.5)
    raise AssertionError(f"{path} has no end: {len(found)} records")


def wandb_history(written: Path) -> list[dict]:
    """The rows of a run, as wandb's own process has written them."""
    rows = [one.history.item for one in wandb_records(written) if one.HasField("history")]
    return [
        {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items} for items in rows
    ]


@pytest.mark.seconds
def test_wandb_keeps_steps_that_are_made_again_and_draws_all_over_the_runs_own(tmp_path):
    """As in a run that goes on, in the same wandb run, from a checkpoint before its last step."""
    pytest.importorskip("wandb", reason="pip install wandb")
    config = config_in(tmp_path / "run", "tracker=wandb", "tracker.mode=offline")
    config.run_dir.mkdir()
    tracker = TRACKERS.find("wandb")(config.tracker, config, config.run_dir)
    steps = [1, 2, 3, 2, 3, 4]
    for life, step in enumerate(steps):
        tracker.write(step, {"reward/mean": life / 4})
        tracker.details(step, DETAILS)
    tracker.close(failed=False)
    (written,) = config.run_dir.glob("wandb/offline-run-*/*.wandb")
    rows = wandb_history(written)
    assert [row["step"] for row in rows if "reward/mean" in row] == steps
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    assert rewards == [life / 4 for life in range(6)]
    assert [row["step"] for row in rows if "samples/path" in row] == steps
    assert [row["_step"] for row in rows] == [*range(12)]  # wandb's own never falls
    defined = [one.metric for one in wandb_records(written) if one.HasField("metric")]
    assert [(one.glob_name, one.step_metric) for one in defined if one.glob_name] == [("*", "step")]


@pytest.mark.seconds
def test_the_newest_offline_directory_of_wandb_has_the_whole_run_as_it_went_on(tmp_path):
    """What is synced later takes the place of what was there, and has to hold all of it."""
    pytest.importorskip("wandb", reason="pip install wandb")
    config = config_in(tmp_path / "run", "tracker=wandb", "tracker.mode=offline")
    run_dir = run_for(config, range(1, 4))
    (first,) = run_dir.path.glob("wandb/offline-run-*/*.wandb")
    run_dir.rewind(2)  # as a run does that goes on from the checkpoint of step 2
    time.sleep(1.1)  # wandb names directories by the second
    run_for(config, range(3, 5), resume=True)
    (second,) = {*run_dir.path.glob("wandb/offline-run-*/*.wandb")} - {first}
    assert first.name == second.name and first.parent.name < second.parent.name  # one run's id
    rows = [row for row in wandb_history(second) if "reward/mean" in row]
    assert [(row["step"], row["reward/mean"]) for row in rows] == [
        (1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0),
    ]  # fmt: skip
    assert all(math.isnan(row["eval/aime/pass@8"]) for row in rows)


@pytest.mark.seconds
def test_wandb_has_samples_histograms_config_and_adapters(tmp_path):
    pytest.importorskip("wandb", reason="pip install wandb")

    arguments = ("tracker=wandb", "tracker.mode=offline", "tracker.adapters=true")
    run_dir = run_for(config_in(tmp_path / "run", *arguments), range(1, 3))
    (written,) = run_dir.path.glob("wandb/offline-run-*/*.wandb")
    found = wandb_records(written)
    by_kind: dict[str, list] = {}
    for one in found:
        by_kind.setdefault(one.WhichOneof("record_type"), []).append(one)
    history = wandb_history(written)
    rewards = [(row["step"], row["reward/mean"]) for row in history if "reward/mean" in row]
    assert rewards == [(1, 0.25), (2, 0.5)]
    details = [row for row in history if "samples/path" in row]
    assert [row["step"] for row in details] == [1, 2]
    assert sum(details[0]["histogram/reward/values"]) == 4
    table = json.loads((written.parent / "files" / details[0]["samples/path"]).read_text())
    assert table["columns"] == ["prompt", "response", "reward", "advantage"]
    assert table["data"] == [["2 + 2", "4", 1.0, 0.5], ["2 + 2", "5", 0.0, 0.5]]
    (run,) = by_kind["run"]
    config = {i.key: json.loads(i.value_json) for i in run.run.config.update}
    assert config["trainer"]["lr"] == RunConfig().trainer.lr
    artifacts = [one.artifact for one in by_kind["artifact"] if one.artifact.type == "adapter"]
    (file,) = artifacts[0].manifest.contents
    assert file.path == "adapter_config.json"
    # What `wandb sync` sends is still there, though the run's own copy on its way here is not.
    assert Path(file.local_path).read_text() == '{"r": 2}' and not (run_dir.path / FOLDER).exists()
    assert set(artifacts[0].aliases) == {"latest", "step-000002"} and len(artifacts) == 1


@pytest.mark.seconds
def test_tensorboard_reads_scalars_histograms_and_text_also_after_a_resume(tmp_path):
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = config_in(tmp_path / "run", "tracker=tensorboard")
    run_dir = run_for(config, range(1, 4))
    run_dir.rewind(2)  # as a run does that goes on from the checkpoint of step 2
    run_for(config, range(3, 5), resume=True)
    events = EventAccumulator(str(run_dir.path / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    read = [(one.step, one.value) for one in events.Scalars("reward/mean")]
    assert read == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
    assert all(math.isnan(one.value) for one in events.Scalars("eval/aime/pass@8"))
    assert events.Histograms("histogram/reward")[0].histogram_value.num == 4
    texts = events.Tensors("samples/1/text_summary")
    assert b"response: 5" in texts[0].tensor_proto.string_val[0]
    assert b"group_size" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]


@pytest.mark.seconds
def test_tensorboard_has_evaluations_at_their_own_step_also_when_a_run_is_resumed(tmp_path):
    """With schedule.lag that of step 2 is known after step 3 is on record."""
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = config_in(tmp_path / "run", "tracker=tensorboard")
    with RunDir(config, resume=False) as run_dir, MetricsWriter(run_dir, config) as metrics:
        for step, name in ((1, "reward/mean"), (3, "reward/mean"), (2, "eval/ho/avg")):
            metrics.write({"step": step, name: 0.5})
    run_dir.rewind(2)
    run_for(config, range(3, 5), resume=True)
    events = EventAccumulator(str(run_dir.path / "tensorboard"))
    events.Reload()
    assert [one.step for one in events.Scalars("eval/ho/avg")] == [2]
    assert [one.step for one in events.Scalars("reward/mean")] == [1, 3, 4]


@pytest.mark.seconds
def test_tensorboard_shows_one_course_of_a_run_that_had_no_checkpoint_yet(tmp_path):
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = config_in(tmp_path / "run", "tracker=tensorboard")
    run_dir = run_for(config, range(1, 4))
    run_dir.rewind(0)
    run_for(config, range(1, 3), resume=True)
    events = EventAccumulator(str(run_dir.path / "tensorboard"))
    events.Reload()
    assert [one.step for one in events.Scalars("reward/mean")] == [1, 2]


@pytest.mark.seconds
def test_mlflow_reads_params_metrics_samples_and_adapters_of_one_run(tmp_path):
    for package in ("mlflow", "sqlalchemy", "alembic"):
        pytest.importorskip(package, reason="pip install mlflow-skinny sqlalchemy alembic")
    from mlflow.tracking import MlflowClient

    arguments = ("tracker=mlflow", "tracker.project=mine", "tracker.adapters=true")
    config = config_in(tmp_path / "run", *arguments)
    run_for(config, range(1, 3))
    run_for(override(config, ["trainer.lr=0.5"]), range(3, 4), resume=True)
    client = MlflowClient(f"sqlite:///{tmp_path}/run/mlflow.db")
    experiment = client.get_experiment_by_name("mine")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == "run"
    assert run.data.params["trainer.lr"] == str(RunConfig().trainer.lr)
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(one.step, one.value) for one in history] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert math.isnan(client.get_metric_history(run.info.run_id, "eval/aime/pass_8")[0].value)
    files = {
        file.path
        for folder in ("samples", "adapters/step-000003", "")
        for file in client.list_artifacts(run.info.run_id, folder)
    }
    assert {"samples/step-000001.json", "config.yaml"} <= files
    assert "adapters/step-000003/adapter_config.json" in files
    table = client.download_artifacts(run.info.run_id, "samples/step-000002.json", str(tmp_path))
    table = json.loads(Path(table).read_text())
    assert table["columns"][:3] == ["step", "prompt", "response"]
    assert table["data"][1][:3] == [2, "2 + 2", "5"]
    saved = client.download_artifacts(run.info.run_id, "config.yaml", str(tmp_path))
    assert "lr: 0.5" in Path(saved).read_text()


@pytest.mark.seconds
def test_trackio_reads_metrics_config_and_adapters_of_one_run(tmp_path):
    pytest.importorskip("trackio", reason="pip install trackio")
    from trackio.sqlite_storage import SQLiteStorage

    config = config_in(
        tmp_path / "run", "tracker=trackio", "tracker.project=mine", "tracker.adapters=true"
    )
    run_for(config, range(1, 3))
    run_dir = run_for(config, range(3, 4), resume=True)
    name = (run_dir.path / ".trackio-name").read_text()
    assert name.startswith("run-") and SQLiteStorage.get_runs("mine").count(name) == 1
    logs = SQLiteStorage.get_logs("mine", name)
    rewards = [(one["step"], one["reward/mean"]) for one in logs if "reward/mean" in one]
    assert rewards == [(1, 0.25), (2, 0.5), (3, 0.75)]
    shown = [one for one in logs if "samples" in one]
    assert sum(shown[0]["histogram/reward"]["values"]) == 4
    assert "2 + 2" in json.dumps(shown[0]["samples"])
    saved = SQLiteStorage.get_run_config("mine", name)
    assert saved["trainer"]["lr"] == RunConfig().trainer.lr
    assert SQLiteStorage.get_artifacts("mine")
    files = [path for path in (tmp_path / "trackio").rglob("*") if path.is_file()]
    assert b'{"r": 3}' in [path.read_bytes() for path in files]  # as it was at its step


IN_A_PROCESS = """
import sys
sys.path[:0] = sys.argv[3:]
from pathlib import Path
from test_trackers import config_in, run_for
arguments = f"tracker={sys.argv[1]}", "tracker.project=mine", "tracker.adapters=true"
offline = ["tracker.mode=offline"] if sys.argv[1] == "wandb" else []
run_for(config_in(Path(sys.argv[2]), *arguments, *offline), range(1, 3))
"""


@pytest.mark.seconds
@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_no_tracker_says_anything_between_the_lines_of_a_run(name, tmp_path):
    """With --json there are records on stdout and nothing else, up to the process's end."""
    for package in TRACKERS.find(name).modules:
        pytest.importorskip(package)
    command = [sys.executable, "-W", "ignore", "-c", IN_A_PROCESS, name, str(tmp_path / "run")]
    ran = subprocess.run(
        [*command, str(Path(__file__).parent), *sys.path], capture_output=True, text=True
    )
    ours = "warning: waiting for the tracker"  # on a machine that is slow
    others = [line for line in ran.stderr.splitlines() if not line.startswith(ours)]
    assert (ran.returncode, ran.stdout, others) == (0, "", [])


class Broken:
    """A file of one's own with a tracker that fails in the middle of a run."""

    SOURCE = """
from pydantic import Field
from lora_moe_rl.config import TrackerConfig
from lora_moe_rl.telemetry.trackers.base import Tracker

class Good(Tracker):
    def __init__(self, settings, config, run_dir):
        self.file = open(run_dir / "good.txt", "a", buffering=1)
    def write(self, step, metrics):
        self.file.write(f"{step}\\n")
    def close(self, failed):
        self.file.write("failed" if failed else "done")
        self.file.close()

class Bad(Good):
    class Settings(TrackerConfig):
        at: int = Field(2, description="The step at which it fails.")
    def __init__(self, settings, config, run_dir):
        self.at, self.file = settings.at, open(run_dir / "bad.txt", "a", buffering=1)
    def write(self, step, metrics):
        if step == self.at:
            raise OSError("the server is gone")
        self.file.write(f"{step}\\n")

class Unwilling(Good):
    def __init__(self, settings, config, run_dir):
        from lora_moe_rl.errors import ConfigError
        raise ConfigError("no")

class Otherwise(Good):
    class Settings(TrackerConfig):
        at: str = Field("two", description="Something else.")
"""


@pytest.fixture
def mine(tmp_path) -> str:
    file = tmp_path / "mine.py"
    file.write_text(Broken.SOURCE)
    return str(file)


def test_several_trackers_get_the_same_and_one_that_fails_does_not_end_the_run(
    tmp_path, mine, capsys
):
    every = f"tracker.name={mine}:Bad,{mine}:Good"
    config = config_in(tmp_path / "run", every, "tracker.at=2")
    run_dir = run_for(config, range(1, 4))
    assert (run_dir.path / "good.txt").read_text() == "1\n2\n3\ndone"
    assert (run_dir.path / "bad.txt").read_text() == "1\ndone"
    assert "the tracker Bad failed and is left out from now on: the server is gone" in (
        capsys.readouterr().err
    )
    assert [record["step"] for record in read_metrics(run_dir)] == [1, 2, 3]


def test_a_tracker_that_does_not_start_ends_those_before_it(tmp_path, mine):
    config = config_in(tmp_path / "run", f"tracker.name={mine}:Good,{mine}:Unwilling")
    with pytest.raises(ConfigError, match="^no$"):
        run_for(config, range(1, 2))
    assert (tmp_path / "run/good.txt").read_text() == "failed"


def test_several_trackers_share_their_settings_and_are_saved_as_they_are(tmp_path):
    config = config_in(
        tmp_path / "run", "tracker=wandb,tensorboard,mlflow", "tracker.project=mine",
        "tracker.mode=offline", "tracker.uri=http://here",
    )  # fmt: skip
    tracker = config.tracker.model_dump()
    assert (tracker["project"], tracker["mode"], tracker["uri"]) == (
        "mine",
        "offline",
        "http://here",
    )
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    again = load_config(str(tmp_path / "config.yaml"))
    assert again.tracker.model_dump() == tracker


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("tracker=wandb,wandb", "wandb cannot be one of several, or is there twice"),
        ("tracker=none,wandb", "none cannot be one of several"),
        ("tracker=wandb,tensorbord", "did you mean tensorboard"),
        ("tracker=tensorboard,trackio tracker.mode=offline", "it is one of wandb"),
        ("tracker=tensorboard tracker.adapters=true", "it is one of mlflow, trackio, wandb"),
        ("algorithm=grpo,rloo", "'grpo,rloo' is none of"),
    ],
)
def test_trackers_that_cannot_be_chosen_are_refused(arguments, said):
    with pytest.raises(ConfigError, match=said):
        override(RunConfig(), arguments.split())


def test_two_trackers_with_one_setting_of_two_meanings_are_refused(mine):
    with pytest.raises(ConfigError, match="Bad and Otherwise both have the setting at"):
        override(RunConfig(), [f"tracker.name={mine}:Bad,{mine}:Otherwise"])


INSTALLED_AS = {"wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow.entities",
                "tensorboard": "torch.utils.tensorboard"}  # fmt: skip


@pytest.mark.parametrize("name", sorted(INSTALLED_AS))
def test_without_its_package_a_tracker_says_how_to_install_it(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, INSTALLED_AS[name], None)  # as if it were not there
    config = config_in(tmp_path / "run", f"tracker={name}")
    package = TRACKERS.find(name).packages[0]
    with pytest.raises(ConfigError, match=f"tracker.name names {name}.*pip install '{package}'"):
        run_for(config, range(1, 2))


def test_the_packages_of_trackers_are_extras_of_ours():
    import tomllib

    root = Path(__file__).parents[3]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = extras["optional-dependencies"]
    for name in INSTALLED_AS:
        wanted = [one.partition("==")[0] for one in TRACKERS.find(name).packages]
        assert extras[name] == wanted
