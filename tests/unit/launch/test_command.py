"""What `lora-moe-rl launch` writes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from lora_moe_rl.config.recipes import load_config
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.launch import command

RECIPE = Path(__file__).parents[3] / "recipes/tiny_arithmetic.py"
LAYOUT = ("trainer.world_size=8", "trainer.tp=1", "trainer.ep=4", "rollout.engines=8")


def launch(tmp_path: Path, kind: str, *more: str) -> Path:
    run_dir = f"logging.run_dir={tmp_path}/runs/K2_a"
    assert command.main([str(RECIPE), run_dir, *LAYOUT, "--on", kind, *more]) == 0
    return tmp_path / "runs/K2_a-launch"


def test_a_slurm_script_is_whole_and_its_config_is_the_runs(tmp_path, capsys):
    folder = launch(tmp_path, "slurm", "rollout.temperature=0.5", "--gpus-per-node", "4")
    script = folder / "run.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    assert "#SBATCH --job-name=k2-a\n" in text
    assert "#SBATCH --nodes=4 --ntasks-per-node=1 --gpus-per-node=4 --exclusive --mem=0\n" in text
    assert f"lora-moe-rl train {folder}/config.yaml" in text and "{" + "job" not in text
    said = capsys.readouterr().out
    assert f"4 nodes of 4 GPUs; begin, and go on after any end, with: sbatch {script}" in said
    config = load_config(str(folder / "config.yaml"))
    assert config.rollout.temperature == 0.5 and config.trainer.world_size == 8
    assert config.run_dir == tmp_path / "runs/K2_a"


PROGRAMS = {
    "scontrol": "echo n1; echo n2",
    "srun": 'echo srun "$@" >> {told}; [[ "$*" != *--head* ]]',
    "ray": 'echo ray "$@" >> {told}; [[ "$*" != *--head* && $1 != status ]]',
    "ssh": '[[ $1 != -G ]] || printf "user me\\nhostname %s\\nport 22\\n" "${{2#*@}}"',
    "python": '[[ $2 != *.address ]] || echo "10.0.0.1 for $3"',
}


@pytest.mark.parametrize("kind", ["slurm", "ssh"])
def test_ray_is_started_where_the_other_nodes_see_it_or_the_job_ends(tmp_path, kind):
    """The script, by bash, with programs that tell what they were given, and a Ray that does not
    start: nothing waits for it."""
    hosts = ("--hosts", "n1,me@n2") if kind == "ssh" else ()
    folder = launch(tmp_path, kind, *hosts, "--environment", str(tmp_path))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/activate").write_text("")
    told = tmp_path / "told"
    for name, code in PROGRAMS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{code.format(told=told)}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    variables |= {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    script = folder / {"slurm": "run.sbatch", "ssh": "run.sh"}[kind]
    ended = subprocess.run(["bash", script], env=variables, timeout=60, capture_output=True)
    assert ended.returncode == 1
    (start,) = [line for line in told.read_text().splitlines() if "--head" in line]
    assert "--node-ip-address=10.0.0.1 for n2 " in start


def test_a_run_that_has_steps_is_gone_on_with(tmp_path):
    folder = launch(tmp_path, "slurm")
    line = f"lora-moe-rl train {folder}/config.yaml --resume=auto &\n"
    assert line in (folder / "run.sbatch").read_text()


@pytest.mark.parametrize(
    ("told", "code", "queued"),
    [(True, 130, "requeue 7\n"), (True, 0, ""), (False, 2, "")],
    ids=["has_steps_left", "came_to_its_end", "failed"],
)
def test_a_job_that_slurm_ends_is_queued_again_unless_its_run_is_done(tmp_path, told, code, queued):
    """The end of the script, by bash, with a run that ends when it is told, and a Slurm that writes
    down what it is asked."""
    script = (launch(tmp_path, "slurm") / "run.sbatch").read_text()
    end = script[script.index("told=") :]
    programs, asked = tmp_path / "bin", tmp_path / "asked"
    programs.mkdir()
    tell = 'kill -TERM "$PPID"; sleep 20 & wait' if told else ""
    run = f"#!/bin/bash\ntrap 'exit {code}' TERM\n{tell}\nexit {code}\n"
    for name, text in {
        "lora-moe-rl": run,
        "scontrol": f'#!/bin/sh\necho "$@" > {asked}\n',
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    asked.touch()
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", end],
        env={"PATH": f"{programs}:/usr/bin:/bin", "SLURM_JOB_ID": "7"},
        timeout=30,
    )
    assert ended.returncode == code
    assert asked.read_text() == queued


def test_a_ray_job_asks_for_its_nodes_and_looks_at_each(tmp_path):
    folder = launch(tmp_path, "kuberay", "--image", "registry/image:1", "--gpus-per-node", "8")
    job = yaml.safe_load((folder / "rayjob.yaml").read_text())
    assert job["kind"] == "RayJob" and job["metadata"]["name"] == "k2-a"
    cluster = job["spec"]["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    assert group["replicas"] == 2 and cluster["authOptions"] == {"mode": "token"}
    pod = group["template"]["spec"]
    (look,), (container,) = pod["initContainers"], pod["containers"]
    assert look["command"][-1].startswith("python -m lora_moe_rl.launch.node ")
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert container["image"] == look["image"] == "registry/image:1"
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted == {"/" + tmp_path.parts[1], "/dev/shm"}
    assert container["env"] == [{"name": "RAY_worker_niceness", "value": "0"}]


def test_a_ray_job_gives_its_gpus_back_and_can_be_begun_once_more(tmp_path, capsys):
    """KubeRay neither ends the pods of a job nor starts one that has ended, unless it is told."""
    folder = launch(tmp_path, "kuberay")
    spec = yaml.safe_load((folder / "rayjob.yaml").read_text())["spec"]
    assert spec["shutdownAfterJobFinishes"] is True
    assert f"with: kubectl replace --force -f {folder}/rayjob.yaml" in capsys.readouterr().out


def test_pods_find_a_model_of_the_hub_where_it_is(tmp_path, monkeypatch):
    from huggingface_hub import constants

    shared = "/" + tmp_path.parts[1]
    monkeypatch.setattr(constants, "HF_HOME", f"{shared}/hf")
    folder = launch(tmp_path, "kuberay", "model.path=owner/model")
    spec = yaml.safe_load((folder / "rayjob.yaml").read_text())["spec"]["rayClusterSpec"]
    head, (nodes,) = spec["headGroupSpec"], spec["workerGroupSpecs"]
    for pod in (head["template"]["spec"], nodes["template"]["spec"]):
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            assert {"name": "HF_HOME", "value": f"{shared}/hf"} in container["env"]
    monkeypatch.setattr(constants, "HF_HOME", "/root-of-another/hf")
    with pytest.raises(ConfigError, match=f"is not below {shared}, where they mount the claim"):
        launch(tmp_path, "kuberay", "model.path=owner/model")
    launch(tmp_path, "kuberay", f"model.path={tmp_path}")
    launch(tmp_path, "slurm", "model.path=owner/model")


def test_slurm_tells_the_run_as_long_before_its_end_as_it_is_asked(tmp_path):
    for more, seconds in (((), 1800), (("--notice", "4000"), 4000)):
        text = (launch(tmp_path, "slurm", *more) / "run.sbatch").read_text()
        assert f"#SBATCH --requeue --signal=B:TERM@{seconds}\n" in text
        assert "--open-mode=append" in text


def test_a_notice_that_sbatch_would_refuse_is_refused_here(tmp_path, capsys):
    with pytest.raises(SystemExit):
        launch(tmp_path, "slurm", "--notice", "65536")
    assert "argument --notice: 65536 is more than 65535" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "option"),
    [("kuberay", "--environment"), ("kuberay", "--notice"), ("ssh", "--notice")],
)
def test_options_of_another_kind_are_refused(tmp_path, kind, option):
    with pytest.raises(ConfigError, match=f"{option} 7 has no effect with --on {kind}"):
        launch(tmp_path, kind, option, "7")


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("2025-03-01-run", "run-2025-03-01-run"),
        ("a" * 39 + ".seven", "a" * 39),
        ("___", "run"),
        ("K2_a", "k2-a"),
    ],
)
def test_the_name_of_a_ray_job_is_one_that_kubernetes_takes(tmp_path, name, label):
    launch(tmp_path, "kuberay", f"logging.run_dir={tmp_path}/{name}")
    job = yaml.safe_load((tmp_path / f"{name}-launch/rayjob.yaml").read_text())
    assert job["metadata"]["name"] == label
    assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", label) and len(label) <= 63  # DNS-1035


@pytest.mark.parametrize(
    ("kind", "words", "said"),
    [
        ("slurm", ("--hosts", "n1"), "--hosts n1 has no effect with --on slurm"),
        ("ssh", ("--image", "a"), "--image a has no effect with --on ssh"),
        ("ssh", ("--hosts", ","), "--hosts names no host"),
        ("ssh", ("--hosts", " n1, n1", "--gpus-per-node", "8"), "--hosts names 1: n1"),
        ("kuberay", ("logging.run_dir=/",), "is the root of all files"),
    ],
)
def test_what_has_no_effect_or_no_place_is_refused(tmp_path, kind, words, said):
    with pytest.raises(ConfigError, match=said):
        launch(tmp_path, kind, *words)


def test_the_hosts_of_ssh_are_all_named(tmp_path):
    hosts = ("--gpus-per-node", "8", "--hosts", "n1,n2,n3")
    folder = launch(tmp_path, "ssh", *hosts)
    script = folder / "run.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert "others=(n2)" in script.read_text()  # two nodes hold it
    with pytest.raises(ConfigError, match="needs 2 nodes of 8 GPUs, and --hosts names 1: n1"):
        launch(tmp_path, "ssh", "--hosts", "n1")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--nodes", "1"], "--nodes 1 of 8 GPUs do not hold the run: it needs 2"),
        (["--out", "/tmp/a b"], "characters that a script could take"),
        (["--out", "/proc/launch"], "cannot write into /proc/launch: .*--out DIR"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tmp_path, more, message):
    with pytest.raises(ConfigError, match=message):
        launch(tmp_path, "slurm", *more)


def test_pods_must_see_the_config_where_they_see_the_run(tmp_path):
    with pytest.raises(ConfigError, match="mount the claim 'shared' at .*--out /elsewhere"):
        launch(tmp_path, "kuberay", "--out", "/elsewhere/launch")
