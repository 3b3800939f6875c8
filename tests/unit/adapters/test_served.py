"""An adapter that began at its base, as it is computed with, served and exported."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from published_configs import DEEPSEEK_V3, shrunk
from refit_ranks import make_layouts

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.layers import LoRALinear, Switch
from lora_moe_rl.adapters.served import served
from lora_moe_rl.adapters.sharding import RankLayout
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.adapters.starts import STARTS, start
from lora_moe_rl.config import AdapterConfig
from lora_moe_rl.refit.sender import Sender, held_by
from lora_moe_rl.refit.transports import shm

pytestmark = pytest.mark.seconds  # imports Megatron-core

SHAPE = ModelShape.from_hf_config(shrunk(DEEPSEEK_V3) | {"num_hidden_layers": 1})


class Base(torch.nn.Module):
    """A linear as Megatron's: it returns its output and no bias."""

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def forward(self, x):
        return F.linear(x, self.weight), None


class OfWeight:
    def __init__(self, init: str, weight: torch.Tensor):
        self.init, self.weight = init, weight

    def tensors(self, site, experts):
        found = start(self.init, self.weight, site.trained_rank, site.scale)
        return tuple(one.numpy() for one in found)


@pytest.fixture(params=STARTS)
def layer(request) -> LoRALinear:
    """Of a linear with a start from it, moved by far less than bfloat16 tells apart at the start's
    own size."""
    spec = spec_of(request.param)
    (site,) = spec
    generator = torch.Generator().manual_seed(0)
    size = site.out_features, site.in_features
    weight = torch.randn(size, generator=generator) / site.in_features**0.5
    found = LoRALinear(
        Base(weight), [site], [site.out_features], RankLayout(), Switch(), 0,
        OfWeight(request.param, weight),
    )  # fmt: skip
    with torch.no_grad():
        for parameter in (found.A, *found.B):
            signs = torch.randn(parameter.shape, generator=generator).sign()
            parameter.add_(1e-5 * parameter.abs().mean() * signs)
    return found


def spec_of(init: str) -> AdapterSpec:
    config = AdapterConfig(rank=4, alpha=8, init=init, targets=("kv_a_proj",))
    return AdapterSpec.build(SHAPE, config)


def stored(layer: LoRALinear) -> dict[str, np.ndarray]:
    """The canonical tensors as a checkpoint has them."""
    halves: dict[str, list[np.ndarray]] = {}
    for s in layer.slices():
        halves.setdefault(s.name, []).append(s.tensor.detach()[s.index].numpy())
    return {
        name: np.concatenate(both, -2 if name[-1] == "A" else -1) for name, both in halves.items()
    }


def delta(layer: LoRALinear) -> np.ndarray:
    """s (B A - B0 A0), float64."""
    A, A0, B, minus_B0 = (s.tensor.detach().double().numpy() for s in layer.slices())
    return layer.sites[0].scale * (B @ A + minus_B0 @ A0)


def error(found: np.ndarray, wanted: np.ndarray) -> float:
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


def test_at_its_start_it_is_the_base(layer):
    with torch.no_grad():
        layer.A.copy_(layer.A0)
        layer.B[0].copy_(-layer.B0_0)
    x = torch.randn(5, SHAPE.hidden_size)
    assert torch.equal(layer(x)[0], layer.base(x)[0])


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_what_was_trained_is_computed_in_a_short_dtype_too(layer, dtype, most):
    """As [A; A0] and [B, -B0] it would be lost in bfloat16: the error is more than what was
    trained."""
    x = torch.randn(64, SHAPE.hidden_size, generator=torch.Generator().manual_seed(1)).to(dtype)
    wanted = x.double().numpy() @ delta(layer).T
    assert error(layer._delta(x).detach().double().numpy(), wanted) < most
    whole = {n[-1]: torch.from_numpy(v).to(dtype) for n, v in stored(layer).items()}
    plain = layer.sites[0].scale * F.linear(F.linear(x, whole["A"]), whole["B"])
    assert error(plain.double().numpy(), wanted) > 100 * most or dtype == torch.float32


def test_gradients_are_those_of_the_function(layer):
    x = torch.randn(6, SHAPE.hidden_size, generator=torch.Generator().manual_seed(2))
    into = torch.randn(6, layer.sites[0].out_features, generator=torch.Generator().manual_seed(3))
    (layer(x)[0] * into).sum().backward()
    A, B = layer.A.detach().double(), layer.B[0].detach().double()
    both, scale = into.double().T @ x.double(), layer.sites[0].scale
    assert error(layer.A.grad.numpy(), (scale * B.T @ both).numpy()) < 1e-5
    assert error(layer.B[0].grad.numpy(), (scale * both @ A.T).numpy()) < 1e-5


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_so_it_is_sent_as_it_is_now(layer, dtype, most):
    spec = spec_of("olora")
    (layout,) = make_layouts(spec, dtype=dtype)
    scales = {site.name: site.scale for site in spec}
    sender = Sender(layout, held_by(layer.served()), scales, shm.Outgoing())
    for _ in range(2):
        sender.send(1)
        values = torch.as_tensor(sender.buffer).view(getattr(torch, dtype))
        sent = {one.matrix: one.view(values).double().numpy() for one in layout.entries}
        assert error(sent["B"] @ sent["A"], delta(layer)) < most
        with torch.no_grad():
            layer.A.mul_(1.001)


def test_and_what_is_read_of_a_checkpoint_is_what_is_sent(layer):
    spec = spec_of("olora")
    sent: dict[str, list[np.ndarray]] = {}
    for name, _, part in layer.served():
        value = part if isinstance(part, torch.Tensor) else part.value()
        sent.setdefault(name, []).append(value.numpy())
    for name, whole in stored(layer).items():
        both = np.concatenate(sent[name], -2 if name[-1] == "A" else -1)
        np.testing.assert_array_equal(served(spec, name, whole), both)


def test_an_adapter_that_did_not_begin_at_its_base_is_served_as_it_is():
    spec = AdapterSpec.build(SHAPE, AdapterConfig(rank=4))
    for name, shape in spec.tensor_shapes.items():
        whole = np.ones(shape, np.float32)
        assert served(spec, name, whole) is whole


def test_how_much_of_an_update_bfloat16_keeps():
    """After n steps of Adam's size at lr 1e-5: relative errors of what the adapter adds."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(2048, 768, generator=generator) / 768**0.5
    A0, B0 = start("olora", weight, 16, 2.0)
    x = torch.randn(256, 768, generator=generator).bfloat16()

    def adds(A: torch.Tensor, B: torch.Tensor) -> np.ndarray:
        inner = F.linear(x, A.bfloat16())
        return F.linear(inner, (2.0 * B).bfloat16()).double().numpy()

    for steps in (1, 10, 100):
        A, B = (
            M + 1e-5 * steps * torch.randn(M.shape, generator=generator).sign() for M in (A0, B0)
        )
        exact = 2.0 * (B.double() @ A.double() - B0.double() @ A0.double())
        wanted = (x.double() @ exact.T).numpy()
        whole = error(adds(torch.cat([A, A0]), torch.cat([B, -B0], 1)), wanted)
        moved = error(adds(torch.cat([A, A0 - A]), torch.cat([B - B0, -B0], 1)), wanted)
        print(f"{steps:4d} steps: [B, -B0] [A; A0] {whole:.1%}, the differences {moved:.2%}")
        assert moved < 0.005 and whole > 10 * moved
