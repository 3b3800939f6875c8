"""Plug-ins of one's own that a config names."""

from __future__ import annotations

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.plugins import own_files

MINE = """
from lora_moe_rl.algorithms.grpo import GRPO
from lora_moe_rl.algorithms.losses.base import PolicyLoss
from lora_moe_rl.environments.single_turn import SingleTurn

class MyGRPO(GRPO):
    pass

class MyLoss(PolicyLoss):
    def loss(self, tokens):
        raise NotImplementedError

class MyTurn(SingleTurn):
    pass
"""


def test_files_that_every_process_needs_to_read_a_config_are_known(tmp_path):
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
