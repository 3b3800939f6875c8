"""Activations on the host, on layers of torch's own."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from lora_moe_rl.trainer import host_activations
from lora_moe_rl.trainer.host_activations import HostActivations

WIDTH, TOKENS, LAYERS = 16, 32, 4
CPU = torch.device("cpu")


class Layer(torch.nn.Module):
    """A frozen linear, one that is trained, and views of one storage, as in attention."""

    def __init__(self):
        super().__init__()
        self.frozen = torch.nn.Linear(WIDTH, 2 * WIDTH).requires_grad_(False)
        self.trained = torch.nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden_states, mask=None):
        gate, up = self.frozen(hidden_states).chunk(2, -1)
        inner = torch.cat([torch.nn.functional.silu(gate) * up, up.exp()], -1)
        return hidden_states + mask * torch.tanh(self.trained(inner))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x, mask):
        for layer in self.decoder.layers:
            x = layer(hidden_states=x, mask=mask)
        return x


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(host_activations, "LEAST_BYTES", 512)


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def batches(count: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(TOKENS, WIDTH) for _ in range(count)]


def mask() -> torch.Tensor:
    return torch.linspace(0, 1, TOKENS)[:, None].expand(TOKENS, WIDTH).contiguous()


def gradients(one: Model, together: int) -> list[torch.Tensor]:
    """Of four micro-batches, so many of which are between forward and backward at once."""
    seen, waiting = mask(), []
    for x in batches(4):
        waiting.append(one(x, seen).square().sum())
        if len(waiting) == together:
            waiting.pop(0).backward()
    for loss in waiting:
        loss.backward()
    return [layer.trained.weight.grad for layer in one.decoder.layers]


@pytest.mark.parametrize("together", [1, 3])
def test_gradients_are_the_same_to_the_bit(together):
    usual, other = model(), model()
    host = HostActivations([other], CPU)
    with host.step():
        found = gradients(other, together)
    for one, wanted in zip(found, gradients(usual, together), strict=True):
        assert torch.equal(one, wanted)
    assert host.taken()[1] > 0 and host.taken() == (0.0, 0)
    assert host.last is None and host.open == []


def watched(host: HostActivations) -> dict[int, StorageWeakRef]:
    """Storages that move, by their address, as they are met."""
    met, pack = {}, host._pack

    def spy(tensor):
        saved = pack(tensor)
        if saved is not tensor:
            met[len(met)] = StorageWeakRef(tensor.untyped_storage())
        return saved

    host._pack = spy
    return met


def test_layers_before_the_last_are_not_on_the_device():
    one, seen = model(), mask()
    host, behind = HostActivations([one], CPU), []
    met = watched(host)
    for layer in one.decoder.layers:
        layer.register_forward_hook(lambda *_: behind.append(len(met)))
    with host.step():
        loss = one(batches(1)[0], seen).sum()
        gone = [storage.expired() for storage in met.values()]
        *_, before_last, every = behind
        assert 0 < behind[0] < behind[1] < before_last < every == len(gone)
        # The last layer's are here until another is left.
        assert gone == [True] * before_last + [False] * (every - before_last)
        loss.backward()


def test_what_is_the_bases_the_adapters_or_all_layers_stays():
    """And what is small. Two views of one storage move once."""
    one, seen = model(), mask()
    host, before = HostActivations([one], CPU), []
    with saved_tensors_hooks(lambda t: before.append(t.untyped_storage()) or t, lambda t: t):
        model()(batches(1)[0], seen)
    with host.step():
        loss = one(batches(1)[0], seen).sum()
        layer = host.last
        assert layer is not None
        kept = {address: s.device.nbytes() for address, s in layer.stored.items()}
        loss.backward()
    stay = {p.untyped_storage().data_ptr() for p in one.parameters()}
    assert not kept.keys() & (stay | {seen.untyped_storage().data_ptr()})
    # gate and up, SiLU of the gate, up.exp(), inner, tanh
    size = TOKENS * WIDTH * 4
    assert sorted(kept.values()) == [size] * 3 + [2 * size] * 2
    assert len({s.data_ptr() for s in before}) > LAYERS * len(kept)


def test_without_gradients_nothing_moves_and_a_layer_that_fails_leaves_no_hooks():
    one = model()
    host = HostActivations([one], CPU)
    with torch.no_grad():
        one(batches(1)[0], mask())
    assert host.taken()[1] == 0 and host.last is None
    with pytest.raises(RuntimeError), host.step():
        one(torch.randn(TOKENS, WIDTH + 1), mask())
    assert host.open == []
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    x.square().sum().backward()
    assert host.taken()[1] == 0


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_ends_behind_the_copies_that_it_has_begun(monkeypatch, fails):
    """Memory of what was called back and never read is the computing stream's again."""
    waited: list[object] = []

    class Computing:
        wait_stream = staticmethod(waited.append)

    monkeypatch.setattr(torch.cuda, "current_stream", Computing)
    host = HostActivations([], CPU)
    host.stream = "the copies"
    with pytest.raises(KeyError) if fails else nullcontext(), host.step():
        assert waited == []
        if fails:
            raise KeyError
    assert waited == ["the copies"]
