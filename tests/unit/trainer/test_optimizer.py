"""Learning rates over a run, and of A and B."""

from types import SimpleNamespace

import pytest
import torch

from lora_moe_rl.config import RunConfig, TrainerConfig
from lora_moe_rl.config.overrides import override
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.trainer.optimizer import AdapterOptimizer, learning_rate


def rates(total=10, **config):
    settings = TrainerConfig(lr=8.0, **config)
    return [learning_rate(settings, done, total) for done in range(total)]


def test_a_constant_rate_after_a_warm_up():
    assert rates(total=4) == [8, 8, 8, 8]
    assert rates(total=6, warmup_steps=4) == [2, 4, 6, 8, 8, 8]


def test_a_linear_fall_to_the_least():
    found = rates(warmup_steps=2, lr_schedule="linear")
    assert found == pytest.approx([4, 8, 8, 7, 6, 5, 4, 3, 2, 1])
    found = rates(total=4, lr_schedule="linear", min_lr=4.0)
    assert found == pytest.approx([8, 7, 6, 5])
    assert learning_rate(TrainerConfig(lr=8.0, lr_schedule="linear", min_lr=4.0), 9, 4) == 4


def test_a_cosine():
    found = rates(total=4, lr_schedule="cosine")
    assert found == pytest.approx([8, 4 + 8**0.5, 4, 4 - 8**0.5])


@pytest.mark.parametrize(
    ("name", "schedule"),
    [("get_linear_schedule_with_warmup", "linear"), ("get_cosine_schedule_with_warmup", "cosine")],
)
def test_after_the_warm_up_it_is_transformers_schedule(name, schedule):
    import transformers

    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=8.0)
    theirs = getattr(transformers, name)(sgd, num_warmup_steps=3, num_training_steps=10)
    expected = []
    for _ in range(10):
        expected.append(sgd.param_groups[0]["lr"])
        sgd.step()
        theirs.step()
    assert rates(warmup_steps=3, lr_schedule=schedule)[3:] == pytest.approx(expected[3:])


@pytest.mark.parametrize("ratio", [1.0, 16.0])
def test_b_may_learn_faster_than_a(ratio):
    """The first step of Adam is the learning rate, whatever the gradient."""
    A, B = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    A.grad, B.grad = torch.full((3,), 5.0), torch.full((3,), -0.25)
    gradients = SimpleNamespace(norm=lambda: 1.0, check_copies=lambda: None)
    adapters = SimpleNamespace(
        parameters=lambda: [A, B],
        parameters_of=lambda matrix: [{"A": A, "B": B}[matrix]],
        gradients=gradients,
    )
    config = TrainerConfig(lr=1e-3, warmup_steps=2, lr_ratio_B=ratio)
    result = AdapterOptimizer(config, adapters, total_steps=10).step()
    assert result.lr == 5e-4
    torch.testing.assert_close(A.detach(), torch.full((3,), -5e-4))
    torch.testing.assert_close(B.detach(), torch.full((3,), 5e-4 * ratio))


def test_what_does_not_go_together_is_refused():
    with pytest.raises(ConfigError, match="trainer.min_lr=0.1 has no effect with trainer.lr_sched"):
        override(RunConfig(), ["trainer.lr=1.0", "trainer.min_lr=0.1"])
    with pytest.raises(ConfigError, match="trainer.min_lr=2 is above trainer.lr=1"):
        override(
            RunConfig(), ["trainer.lr=1.0", "trainer.min_lr=2.0", "trainer.lr_schedule=linear"]
        )
