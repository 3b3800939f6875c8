"""Learning rates over a run, and of A and B; Adam over adapters, against torch's own AdamW, clip
and schedule, and by hand."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lora_moe_rl.adapters.gradients import Gradients
from lora_moe_rl.adapters.layers import Slice
from lora_moe_rl.adapters.sharding import RankLayout
from lora_moe_rl.config import RunConfig, TrainerConfig
from lora_moe_rl.config.overrides import override
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.files.trainer_state import CRITIC, POLICY, Done
from lora_moe_rl.trainer import host_moments
from lora_moe_rl.trainer.optimizer import (
    EMPTY,
    AdapterOptimizer,
    StepResult,
    learning_rate,
    norm_and_rate,
)

pytestmark = pytest.mark.seconds  # imports Megatron


def rates(total=10, **config):
    settings = TrainerConfig(lr=8.0, **config)
    return [learning_rate(settings, done, total) for done in range(total)]


def test_optimizer_steps_without_tokens_are_in_no_norm_and_have_no_rate():
    first, second = StepResult(True, 2.0, 0.1), StepResult(False, 4.0, 0.2)
    assert norm_and_rate([first, EMPTY, second, EMPTY]) == (3.0, 0.2)
    assert norm_and_rate([EMPTY]) == (0.0, 0.0)
    assert norm_and_rate([StepResult(True, 2.0, 0.0), EMPTY]) == (2.0, 0.0)  # a critic alone


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


def test_a_rate_goes_on_at_the_same_share_of_a_run_that_makes_other_updates():
    assert Done.of(Done(32, 32).as_meta(POLICY, 4), POLICY, 1) == Done(32, 8)
    assert Done.of(Done(8, 8).as_meta(CRITIC, 1), CRITIC, 4) == Done(8, 32)
    assert Done.of({"optimizer_steps": 5}, POLICY, 4) == Done(5, 5)  # as it was written before
    optimizer, *_ = optimizer_of([0.0], [0.0], lr=8.0, warmup_steps=0, lr_schedule="linear")
    optimizer.restore(Done(40, 7))  # of 10
    assert [optimizer.step().lr for _ in range(3)] == pytest.approx([2.4, 1.6, 0.8])
    assert (optimizer.steps, optimizer.scheduled) == (43, 10)


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


def test_sites_learn_at_rates_of_their_own_also_where_they_share_a_parameter():
    """q and k are rows of one A. Each moves as with an Adam of its own, at its factor of the rate;
    decay is scaled with it, and what has the factor 0 stays."""
    values = {"q": [1.0, -2.0], "k": [3.0, 4.0], "o": [0.5, 1.5], "v": [7.0, 7.0]}
    factors = {"q": 0.5, "k": 1.0, "o": 3.0, "v": 0.0}
    A = torch.nn.Parameter(torch.tensor([values["q"], values["k"]]))
    o, v = (torch.nn.Parameter(torch.tensor([values[name]])) for name in "ov")
    rows = {"q": (A, slice(0, 1)), "k": (A, slice(1, 2)), "o": (o, ...), "v": (v, ...)}
    adapters = SimpleNamespace(
        parameters=lambda: [A, o, v],
        slices=lambda: [
            Slice(f"{site}.A", tensor, index, (0, 0), True)
            for site, (tensor, index) in rows.items()
        ],
        gradients=SimpleNamespace(norm=lambda: 0.5, check_copies=lambda: None),
    )
    settings = {"lr": 1e-2, "weight_decay": 0.1, "adam_beta2": 0.9}
    ours = AdapterOptimizer(TrainerConfig(**settings), adapters, 10, factors)
    alone = {site: torch.nn.Parameter(torch.tensor([value])) for site, value in values.items()}
    theirs = torch.optim.AdamW(
        [{"params": [p], "lr": 1e-2 * factors[site]} for site, p in alone.items()],
        betas=(0.9, 0.9),
        weight_decay=0.1,
    )
    draw = torch.Generator().manual_seed(0)
    for parameter in (A, o, v, *alone.values()):
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(5):
        for site, (tensor, index) in rows.items():
            gradient = torch.randn(1, 2, generator=draw)
            tensor.grad[index] = alone[site].grad = gradient
        ours.step()
        theirs.step()
    for site, (tensor, index) in rows.items():
        torch.testing.assert_close(
            tensor.detach()[index], alone[site].detach(), rtol=1e-6, atol=1e-7
        )
    assert torch.equal(v.detach(), torch.tensor([values["v"]]))


def test_what_does_not_go_together_is_refused():
    with pytest.raises(ConfigError, match="trainer.min_lr=0.1 has no effect with trainer.lr_sched"):
        override(RunConfig(), ["trainer.lr=1.0", "trainer.min_lr=0.1"])
    with pytest.raises(ConfigError, match="trainer.min_lr=2 is above trainer.lr=1"):
        override(
            RunConfig(), ["trainer.lr=1.0", "trainer.min_lr=2.0", "trainer.lr_schedule=linear"]
        )


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def optimizer_of(*values: list[float], **trainer):
    """(the optimizer of an adapter whose A and B hold these values, A, B)."""
    mine = {name: torch.nn.Parameter(torch.tensor(v)) for name, v in zip("AB", values, strict=True)}
    layer = SimpleNamespace(kind="replicated", parameters_of=lambda name: [mine[name]])
    adapters = SimpleNamespace(
        parameters=lambda: list(mine.values()),
        parameters_of=lambda name: [mine[name]],
        slices=lambda: [
            Slice(f"{name}.{name}", tensor, (...,), (0,), True) for name, tensor in mine.items()
        ],
        gradients=Gradients([layer], RankLayout()),
    )
    return AdapterOptimizer(TrainerConfig(**trainer), adapters, total_steps=10), *mine.values()


def test_gradients_above_the_bound_are_clipped_to_it_and_others_are_not():
    """The norm is that of A and B together: 3, 4 and 12 make 13."""
    for clip, factor in ((6.5, 0.5), (13.5, 1.0), (0.0, 1.0)):
        optimizer, A, B = optimizer_of([0.0, 0.0], [0.0], clip_grad=clip, warmup_steps=0)
        A.grad.copy_(torch.tensor([3.0, 4.0]))
        B.grad.fill_(12)
        assert optimizer.step().grad_norm == pytest.approx(13)
        # Adam's first moment: a tenth of the gradient.
        moment = torch.cat([optimizer.state("exp_avg")(p) for p in (A, B)])
        torch.testing.assert_close(moment, 0.1 * factor * torch.tensor([3.0, 4.0, 12.0]))


def test_what_has_the_factor_0_is_in_no_norm_and_no_moment():
    """Half of an A, which q and k share, and all of k's B: the norm is 3, whatever the gradients of
    k are, and NaN among them skips no step."""
    A, B = torch.nn.Parameter(torch.zeros(2, 1)), torch.nn.Parameter(torch.ones(1))
    tensors = {"A": [A], "B": [B]}
    layer = SimpleNamespace(kind="replicated", parameters_of=tensors.get)
    rows = {"q.A": (A, (slice(0, 1),)), "k.A": (A, (slice(1, 2),)), "k.B": (B, (...,))}
    adapters = SimpleNamespace(
        parameters=lambda: [A, B],
        slices=lambda: [Slice(name, *where, (0, 0), True) for name, where in rows.items()],
        gradients=Gradients([layer], RankLayout()),
    )
    config = TrainerConfig(lr=0.1, clip_grad=1.5, weight_decay=0.5)
    for offload in ("none", "optimizer"):
        with torch.no_grad():
            A.zero_()
        config = config.model_copy(update={"offload": offload})
        optimizer = AdapterOptimizer(config, adapters, 10, {"q": 1.0, "k": 0.0})
        A.grad.copy_(torch.tensor([[3.0], [400.0]]))
        B.grad.fill_(float("nan"))
        result = optimizer.step()
        assert result.applied and result.grad_norm == pytest.approx(3)
        torch.testing.assert_close(A.detach(), torch.tensor([[-0.1], [0.0]]))
        moment = optimizer.state("exp_avg")(A)
        torch.testing.assert_close(moment, torch.tensor([[0.15], [0.0]]), rtol=1e-5, atol=0)
        assert B.item() == 1 and B not in optimizer.adam.state
        optimizer.restore(Done(5, 5))
        assert B not in optimizer.adam.state and not optimizer.state("exp_avg_sq")(B).any()


def test_the_first_of_n_warm_up_steps_takes_an_nth_and_the_nth_takes_all():
    """Under a constant gradient Adam moves a weight by the learning rate."""
    optimizer, A, _ = optimizer_of([0.0], [0.0], lr=0.4, warmup_steps=4, weight_decay=0)
    rates, moves = [], []
    for _ in range(6):
        before = A.item()
        A.grad.fill_(0.5)
        rates.append(optimizer.step().lr)
        moves.append(before - A.item())
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])
    assert moves == pytest.approx(rates, rel=1e-5)
    assert optimizer_of([0.0], [0.0], lr=0.4, warmup_steps=0)[0].step().lr == 0.4


def test_weight_decay_shrinks_what_has_no_gradient():
    optimizer, A, B = optimizer_of([2.0], [-4.0], lr=0.1, weight_decay=0.5, warmup_steps=0)
    optimizer.step()
    assert (A.item(), B.item()) == pytest.approx((1.9, -3.8))


def test_ten_steps_are_those_of_torch():
    settings = {"lr": 0.05, "warmup_steps": 3, "clip_grad": 1.0, "weight_decay": 0.1}
    betas = {"adam_beta1": 0.8, "adam_beta2": 0.9, "adam_eps": 1e-6}
    start = torch.tensor([0.3, -0.2, 0.7])
    optimizer, A, B = optimizer_of(start.tolist(), [0.5], **settings, **betas)
    theirs = [start.clone().requires_grad_(), torch.tensor([0.5], requires_grad=True)]
    adam = torch.optim.AdamW(theirs, lr=0.05, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    warm_up = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: min(1.0, (step + 1) / 3))
    draw = torch.Generator().manual_seed(0)
    for _ in range(10):
        for ours, other in zip((A, B), theirs, strict=True):
            other.grad = torch.randn(other.shape, generator=draw)
            ours.grad.copy_(other.grad)
        torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        adam.step()
        warm_up.step()
        assert optimizer.step().applied
    torch.testing.assert_close(A, theirs[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(B, theirs[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("most", [1, 16, 2**20])
def test_moments_that_come_from_the_host_move_the_adapter_to_the_same_bits(monkeypatch, most):
    """However few parameters are stepped at a time; from a checkpoint, too."""
    monkeypatch.setattr(host_moments, "OFFLOAD_BYTES", most)
    settings = {"lr": 0.05, "weight_decay": 0.1, "lr_ratio_B": 2.0, "clip_grad": 0.0}
    draw = torch.Generator().manual_seed(0)
    start = [torch.randn(n, generator=draw).tolist() for n in (3, 40)]
    usual, *ours = optimizer_of(*start, **settings)
    offloaded, *others = optimizer_of(*start, **settings, offload="optimizer")
    for step in range(6):
        if step == 3:
            _again(usual)
            _again(offloaded)
        for one, other in zip(ours, others, strict=True):
            one.grad.copy_(torch.randn(one.shape, generator=draw))
            other.grad.copy_(one.grad)
        assert usual.step().streamed == 0 < offloaded.step().streamed
        for one, other in zip(ours, others, strict=True):
            assert torch.equal(one, other)
            for moment in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(usual.state(moment)(one), offloaded.state(moment)(other))


def test_no_more_than_a_few_parameters_are_stepped_at_a_time(monkeypatch):
    monkeypatch.setattr(host_moments, "OFFLOAD_BYTES", 12)
    sizes = [1, 2, 1, 9, 1, 1, 1, 1]
    parameters = [torch.zeros(size) for size in sizes]
    found = [[p.numel() for p in bucket] for bucket in host_moments.buckets(parameters)]
    assert found == [[1, 2], [1], [9], [1, 1, 1], [1]]
    assert list(host_moments.buckets([])) == []


def _again(optimizer) -> None:
    """Its state is made anew and written, as when a checkpoint is read."""
    kept = [
        (p, key, optimizer.state(key)(p).clone())
        for p in optimizer.adapters.parameters()
        for key in ("exp_avg", "exp_avg_sq")
    ]
    optimizer.restore(Done(optimizer.steps, optimizer.steps))
    for parameter, key, value in kept:
        optimizer.state(key)(parameter).copy_(value)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_changes_nothing(bad):
    optimizer, A, B = optimizer_of([2.0], [1.0], weight_decay=0.5)
    A.grad.fill_(bad)
    assert not optimizer.step().applied
    assert (A.item(), B.item(), optimizer.steps) == (2, 1, 0)
