"""What a trainer rank takes of linears and vocabulary that engines hold too."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from mapped_files import Files
from megatron.core import tensor_parallel as mtp
from plain_checkpoint import HIDDEN, KEYS, QUERIES, VOCABULARY, save_plain
from safetensors.torch import load_file

from lora_moe_rl.adapters.layers import merge_qkv
from lora_moe_rl.adapters.sharding import Box, RankLayout, window
from lora_moe_rl.base.dense import EMBEDDING
from lora_moe_rl.base.held import Held
from lora_moe_rl.base.shared import Shared
from lora_moe_rl.errors import HeldBaseError
from lora_moe_rl.refit.merged_base import Base
from lora_moe_rl.trainer import shared_dense
from lora_moe_rl.trainer.shared_dense import SharedDense, by_group, by_module

HEADS, GROUPS, SIZE = 8, 4, 3
ALONE = RankLayout()


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_q_k_and_v_of_engine_ranks_are_in_megatrons_order(pieces):
    """Against what adapters' outputs go through."""
    whole = [torch.randn(5, n * SIZE) for n in (HEADS, GROUPS, GROUPS)]
    ranks = zip(*(one.chunk(pieces, dim=-1) for one in whole), strict=True)
    held = torch.cat([part for rank in ranks for part in rank], dim=-1)
    sizes = [one.shape[-1] // pieces for one in whole]
    found = by_group(held, sizes, pieces, GROUPS // pieces)
    assert torch.equal(found, merge_qkv(GROUPS)(whole))


def test_gate_and_up_of_engine_ranks():
    held = torch.tensor([[1, 2, 11, 12, 3, 4, 13, 14]])  # two ranks: gate, up; gate, up
    assert by_module(held, [2, 2], 2).tolist() == [[1, 2, 3, 4, 11, 12, 13, 14]]


class Linear(torch.nn.Linear):
    """As Megatron's: returns (output, bias)."""

    def forward(self, x):
        return super().forward(x), None


class InMemory(dict):
    """A store of whole tensors."""

    def part(self, name: str, box: Box) -> torch.Tensor:
        return self[name][window(box.start, box.shape)]


def plain(tmp_path, engine_tp: int = 1, at: RankLayout = ALONE) -> SharedDense:
    """What a rank shares of a small model."""
    folder = str(save_plain(tmp_path / "model"))
    held = Held(str(tmp_path), folder, "float32", engine_tp, False, True)
    base = Base(folder)
    contents = held.contents(base)
    store = InMemory((n, torch.empty(one.shape)) for n, one in contents.tensors.items())
    for name, out in store.items():
        held.filler(base)(name, out)
    return SharedDense(shared_of(held, store, at))


def shared_of(held: Held, store, at: RankLayout = ALONE) -> Shared:
    base = Base(held.model_dir)
    return Shared(held, store, at, {}, held.dense(base), base.shape)


def test_memory_of_another_process_is_taken_as_a_file_is(tmp_path):
    """As on one GPU, with the memory of mapped files."""
    folder = str(save_plain(tmp_path / "model"))
    (tmp_path / "memory").mkdir()
    held, port = (
        Held(str(tmp_path), folder, "float32", 1, False, True, True),
        Files(tmp_path / "memory"),
    )
    owner, mapped = held.share(port, 0), held.map(port)
    shared = shared_of(held, mapped)
    linear, x = linear_of(megatrons(tmp_path).clone()), torch.randn(3, HIDDEN)
    before = linear(x)[0]
    SharedDense(shared).take([model_of(linear)])
    torch.testing.assert_close(linear(x)[0], before)
    owner["model.layers.1.self_attn.qkv_proj.weight"].zero_()
    assert not linear(x)[0].any()
    with pytest.raises(HeldBaseError, match="is not what the engine has put there"):
        for _ in mapped.contents.tensors:
            mapped.check()
    owner.close()


def linear_of(weight: torch.Tensor, bias: bool = False):
    """Megatron's, of one rank, which returns (output, bias)."""
    linear = mtp.ColumnParallelLinear.__new__(mtp.ColumnParallelLinear)
    torch.nn.Module.__init__(linear)
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    linear.bias = torch.nn.Parameter(torch.randn(len(weight))) if bias else None
    linear.forward = lambda x: (torch.nn.functional.linear(x, linear.weight, linear.bias), None)
    return linear


def model_of(linear: torch.nn.Module) -> torch.nn.Module:
    """Of one layer, the second, with q, k and v alone."""
    layer = torch.nn.Module()
    layer.layer_number, layer.self_attention = 2, torch.nn.Module()
    layer.self_attention.linear_qkv = linear
    model = torch.nn.Module()
    model.decoder = torch.nn.Module()
    model.decoder.layers = torch.nn.ModuleList([layer])
    return model


def megatrons(tmp_path) -> torch.Tensor:
    """q, k and v `[rows, columns]` of the second layer, by what adapters' outputs go through."""
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    names = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv")
    return merge_qkv(KEYS // 32)([tensors[name].t() for name in names]).t()


@pytest.mark.parametrize("engine_tp", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_computes_the_same_on_what_is_held(bias, engine_tp, tmp_path):
    shared, x = plain(tmp_path, engine_tp), torch.randn(3, HIDDEN)
    linear = linear_of(megatrons(tmp_path).clone(), bias)
    before = linear(x)[0]
    linear.weight.data.fill_(float("nan"))
    shared.take([model_of(linear)])
    shared.numbers.taken.clear()  # Megatron-Bridge has not been here
    shared.finish()
    torch.testing.assert_close(linear(x)[0], before)
    held = shared.shared.store["model.layers.1.self_attn.qkv_proj.weight"]
    assert linear.weight.data_ptr() == held.data_ptr()


def test_a_rank_has_its_rows_of_the_vocabulary_and_no_copy(tmp_path):
    shared = plain(tmp_path, at=RankLayout(tp=(1, 2)))
    embedding = torch.nn.Embedding(VOCABULARY // 2, HIDDEN)
    model = SimpleNamespace(embedding=SimpleNamespace(word_embeddings=embedding))
    shared._take_vocabulary(model)
    held = shared.shared.store[EMBEDDING]
    assert embedding.weight.data_ptr() == held[VOCABULARY // 2 :].data_ptr()
    (taken,) = shared.numbers.taken.values()
    assert taken.numbers.tolist() == list(range(VOCABULARY // 2 + 1, VOCABULARY + 1))


def test_a_linear_of_another_shape_is_refused(tmp_path):
    with pytest.raises(HeldBaseError, match=r"qkv_proj.weight: Megatron wants \(3, 8\)"):
        plain(tmp_path).take([model_of(linear_of(torch.randn(3, HIDDEN)))])


def test_a_linear_of_another_kind_is_refused(tmp_path):
    with pytest.raises(HeldBaseError, match=r"Megatron has it otherwise \(Linear\)"):
        plain(tmp_path).take([model_of(torch.nn.Linear(8, 3))])


def mapped_by_bridge(shared: SharedDense) -> None:
    """As at a rank's start: q, k and v are taken, and Megatron-Bridge maps their numbers."""
    linear = linear_of(torch.empty(QUERIES + 2 * KEYS, HIDDEN))
    sizes = {"num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 32}
    linear.config = SimpleNamespace(hidden_size=HIDDEN, **sizes)
    shared.take([model_of(linear)])
    task = Task("decoder.layers.1.self_attention.linear_qkv.weight", linear, linear.weight)
    (task,) = shared.numbers.instead([task])
    assert task.param_weight is not linear.weight
    mapping = qkv_mapping()
    numbers = shared.numbers.weight(mapping.hf_param)
    task.param_weight.copy_(mapping.hf_to_megatron(numbers, task.megatron_module))


@pytest.mark.seconds
@pytest.mark.parametrize("engine_tp", [1, 2])
def test_what_is_taken_is_laid_out_as_megatron_bridge_does(engine_tp, tmp_path):
    shared = plain(tmp_path, engine_tp)
    mapped_by_bridge(shared)
    shared.finish()


@pytest.mark.seconds
def test_rows_in_the_engines_order_are_refused(tmp_path, monkeypatch):
    """Of the 128 queries a group has 64, and then its keys."""
    monkeypatch.setattr(shared_dense, "by_group", lambda y, sizes, pieces, groups: y)
    shared = plain(tmp_path)
    mapped_by_bridge(shared)
    message = "place 64 .* would put row 0 of .*k_proj.weight, .* has row 64 of .*q_proj.weight"
    with pytest.raises(HeldBaseError, match=message):
        shared.finish()


@pytest.mark.seconds
def test_rows_of_another_layer_are_refused(tmp_path, monkeypatch):
    shared = plain(tmp_path)
    monkeypatch.setattr(
        shared.numbers, "held", lambda one, of=shared.numbers.held: _of_both(shared, of)
    )
    mapped_by_bridge(shared)
    message = r"would put row 0 of model.layers.1.*, and what is held has row 0 of model.layers.0"
    with pytest.raises(HeldBaseError, match=message):
        shared.finish()


def _of_both(shared: SharedDense, held) -> torch.Tensor:
    """The first layer's in place of the second's."""
    both = [
        held(shared.shared.dense[f"model.layers.{i}.self_attn.qkv_proj.weight"]) for i in (0, 1)
    ]
    return both[0]


def qkv_mapping():
    """Megatron-Bridge's, as it is after a name is looked up."""
    from lora_moe_rl.trainer import bridge

    bridge.load()
    from megatron.bridge.models.conversion.param_mapping import QKVMapping

    hf = {name: f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv"}
    return QKVMapping("decoder.layers.1.self_attention.linear_qkv.weight", **hf)


@dataclass(frozen=True)
class Task:
    param_name: str
    megatron_module: torch.nn.Module
    param_weight: torch.Tensor
