"""What is wrong with a node is found before the run starts, and named."""

from __future__ import annotations

import json
import os

import pytest

from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.launch import node

MINE = {"python": "3.12.1", "torch": "2.13.0"}


def test_nodes_with_the_same_versions_pass(tmp_path):
    for host in ("a", "b", "a"):
        node.check_same_versions(tmp_path / "nodes", host, MINE)
    assert {path.stem for path in (tmp_path / "nodes").iterdir()} == {"a", "b"}


@pytest.mark.parametrize("theirs", [{**MINE, "torch": "2.12.0"}, {"python": "3.12.1"}])
def test_a_node_with_other_versions_names_the_other_node_and_both_versions(tmp_path, theirs):
    node.check_same_versions(tmp_path, "a", theirs)
    there = theirs.get("torch", "missing")
    with pytest.raises(
        ConfigError, match=f"than on a: torch 2.13.0 here and {there} there; .*environment"
    ):
        node.check_same_versions(tmp_path, "b", MINE)


def test_versions_that_cannot_be_read_are_an_error_of_their_place(tmp_path):
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ConfigError, match=f"cannot leave versions in {tmp_path}"):
        node.check_same_versions(tmp_path, "b", MINE)


def test_too_few_gpus_are_counted(monkeypatch):
    with pytest.raises(ConfigError, match="finds 1 GPUs, and the job was made for 8"):
        node.check_gpus(["H200"], 8)
    node.check_gpus([], 0)
    monkeypatch.setattr(node, "versions", lambda: MINE)
    with pytest.raises(ConfigError, match="NCCL is not installed"):
        node.check_gpus(["H200"], 1)


def test_a_name_without_an_address_is_told():
    with pytest.raises(ConfigError, match="mend /etc/hosts or DNS"):
        node.check_address("no-such-host.invalid")
    node.check_address("localhost")


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write everywhere")
def test_a_run_directory_that_cannot_be_written_is_told(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match=f"cannot write below {tmp_path}"):
        node.check_run_dir(tmp_path / "runs/a")


def test_all_that_is_wrong_is_said_at_once_with_the_nodes_name(tmp_path, capsys, monkeypatch):
    config = {"model": {"path": "/no/such/model"}, "logging": {"run_dir": str(tmp_path / "run")}}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    monkeypatch.setattr(node.socket, "gethostname", lambda: "localhost")
    monkeypatch.setattr(node, "gpu_names", list)
    seen = ("--seen", str(tmp_path / "nodes"))
    assert node.main([str(tmp_path / "config.yaml"), "--gpus", "8", *seen]) == 2
    said = capsys.readouterr().err
    assert "localhost: error: model.path='/no/such/model' is not a directory" in said
    assert "localhost: error: nvidia-smi finds 0 GPUs" in said


def test_a_model_that_only_another_node_has_is_told(tmp_path):
    config = RunConfig(
        model={"path": "owner/never-fetched"}, logging={"run_dir": str(tmp_path / "run")}
    )
    problems = node.look(config, 0, tmp_path / "nodes", "localhost")
    assert any("model.path=owner/never-fetched is not here" in one for one in problems)
