"""Plug-ins of one's own that a config names."""

from __future__ import annotations

import re

import pytest

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import override
from lora_moe_rl.config.plugins import own_files
from lora_moe_rl.config.recipes import resolve
from lora_moe_rl.errors import ConfigError

MINE = """
from lora_moe_rl.algorithms.grpo import GRPO
from lora_moe_rl.algorithms.losses.base import PolicyLoss
from lora_moe_rl.algorithms.rejections.base import Rejection
from lora_moe_rl.environments.single_turn import SingleTurn

class MyGRPO(GRPO):
    pass

class MyLoss(PolicyLoss):
    def loss(self, tokens):
        raise NotImplementedError

class MyRejection(Rejection):
    pass

class MyTurn(SingleTurn):
    pass
"""


def test_files_that_every_process_needs_to_read_a_config_are_known(tmp_path):
    tmp_path = tmp_path / "first, second"  # a comma is between names where there can be several
    tmp_path.mkdir()
    files = [tmp_path / f"{name}.py" for name in ("algorithm", "loss", "turn")]
    for path in files:
        path.write_text(MINE)
    config = RunConfig.model_validate(
        {
            "algorithm": {"name": f"{files[0]}:MyGRPO", "loss": f"{files[1]}:MyLoss"},
            "environment": f"{files[2]}:MyTurn",
        }
    )
    assert sorted(own_files(config)) == sorted(files)
    assert own_files(RunConfig()) == []


def test_a_resolved_config_names_them_in_any_directory(tmp_path, monkeypatch):
    """Parts of an algorithm too, and those of several."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    config = RunConfig.model_validate(
        {
            "algorithm": {
                "name": "mine.py:MyGRPO",
                "loss": "mine.py:MyLoss",
                "rejection": "mine.py:MyRejection, veto",
            },
            "environment": "mine.py:MyTurn",
        }
    )
    found = resolve(config)
    mine = tmp_path / "mine.py"
    assert found.algorithm.loss == f"{mine}:MyLoss" and found.algorithm.name == f"{mine}:MyGRPO"
    assert found.algorithm.rejection == f"{mine}:MyRejection, veto"
    assert own_files(found) == [mine] and resolve(found) == found


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("board_sze", "did you mean environment.board_size?"),
        ("bord", "there are name, board_size"),  # not environment.port, of another one
    ],
)
def test_an_unknown_key_of_ones_own_is_told_its_keys(tmp_path, key, hint):
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from lora_moe_rl.config.schema import EnvironmentConfig\n"
        "from lora_moe_rl.environments.base import Environment\n\n\n"
        "class Board(EnvironmentConfig):\n    board_size: int = 3\n\n\n"
        "class Mine(Environment):\n    Settings = Board\n"
    )
    told = re.escape(f"unknown config key 'environment.{key}'; {hint}")
    with pytest.raises(ConfigError, match=f"^{told}$"):
        override(RunConfig(), [f"environment={mine}:Mine", f"environment.{key}=1"])
