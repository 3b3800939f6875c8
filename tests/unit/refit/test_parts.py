"""What trainer ranks send: vLLM's modules, scales, dtypes, checksums, and what is refused."""

from __future__ import annotations

import dataclasses
import gc
import os

import numpy as np
import pytest
import torch
from published_configs import (
    DEEPSEEK_V3,
    GLM_4_5_AIR,
    MIXTRAL_8X7B,
    QWEN1_5_MOE_A2_7B,
    QWEN3_5_35B_A3B,
    QWEN3_30B_A3B,
    shrunk,
)
from refit_ranks import make_layouts, make_senders

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import AdapterConfig, TrainerConfig
from lora_moe_rl.errors import RefitError
from lora_moe_rl.refit import parts
from lora_moe_rl.refit.plan import Box, EngineLayout
from lora_moe_rl.refit.sender import Sender
from lora_moe_rl.refit.transports import shm

QWEN = shrunk(QWEN3_30B_A3B) | {"num_hidden_layers": 2, "mlp_only_layers": [0]}
DEEPSEEK = shrunk(DEEPSEEK_V3) | {"num_hidden_layers": 2, "first_k_dense_replace": 1}
TWO = TrainerConfig(world_size=2, pp=2)


def make_spec(model=QWEN, servable=True, **adapter) -> AdapterSpec:
    shape = ModelShape.from_hf_config(model)
    return AdapterSpec.build(shape, AdapterConfig(**adapter), servable)


def make_tensors(spec: AdapterSpec, seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {
        name: generator.standard_normal(shape, dtype=np.float32)
        for name, shape in spec.tensor_shapes.items()
    }


def sent_values(spec, tensors, dtype="float32") -> dict[str, torch.Tensor]:
    """`{tensor: what arrives}` of one trainer rank, read as the engine reads it."""
    (layout,) = make_layouts(spec, dtype=dtype)
    (sender,) = make_senders([layout], spec, tensors, TrainerConfig())
    sent = sender.send(3)
    buffer = parts.open_part(sent.path, sent.nbytes)
    parts.check_received(layout, sent, buffer, range(len(layout.entries)))
    values = {}
    for entry in layout.entries:
        raw = buffer[entry.offset : entry.offset + entry.nbytes(dtype)].copy()
        values[entry.tensor] = (
            torch.from_numpy(raw).view(getattr(torch, dtype)).view(entry.box.shape)
        )
    return values


def modules_of(spec: AdapterSpec) -> list[str]:
    (layout,) = make_layouts(spec)
    return list(dict.fromkeys(entry.module for entry in layout.entries))


def test_scales_are_folded_into_B():
    spec = make_spec(rank=4, expert_rank=2, alpha=8)
    tensors = make_tensors(spec)
    values = sent_values(spec, tensors)
    assert list(values) == list(tensors)
    for name, whole in tensors.items():
        scale = 1 if name.endswith("A") else 4 if ".experts." in name else 2
        np.testing.assert_array_equal(values[name].numpy(), scale * whole)


def test_a_factor_is_on_top_of_the_scale_of_B_alone():
    spec = make_spec(rank=4, alpha=8)
    tensors = make_tensors(spec)
    (layout,) = make_layouts(spec)
    (sender,) = make_senders([layout], spec, tensors, TrainerConfig())
    sender.factor = 0.5
    sender.send(1)
    values = torch.as_tensor(sender.buffer).view(torch.float32)
    for entry in layout.entries:
        whole = (0.5 * 2 if entry.matrix == "B" else 1) * tensors[entry.tensor]
        np.testing.assert_array_equal(entry.view(values).numpy(), whole)


def test_qwen_sites_go_to_the_modules_of_vllm():
    assert modules_of(make_spec()) == [
        "model.layers.0.self_attn.qkv_proj",
        "model.layers.0.self_attn.o_proj",
        "model.layers.0.mlp.gate_up_proj",
        "model.layers.0.mlp.down_proj",
        "model.layers.1.self_attn.qkv_proj",
        "model.layers.1.self_attn.o_proj",
        "model.layers.1.mlp.experts",
    ]
    (layout,) = make_layouts(make_spec())
    slices = {e.site.removeprefix("layers.1."): e.slices for e in layout.entries if ".1." in e.site}
    assert slices == {
        "q_proj": (0,), "k_proj": (1,), "v_proj": (2,), "o_proj": (0,),
        "experts.gate": (0,), "experts.down": (1,), "experts.up": (2,),
    }  # fmt: skip


def test_rows_of_a_linear_with_several_outputs_go_to_a_slice_each():
    """Queries, keys and values of in_proj_qkv, whose A is in each of the three."""
    spec = make_spec(shrunk(QWEN3_5_35B_A3B), rank=3)
    (layout,) = make_layouts(spec)
    mine = [e for e in layout.entries if e.module == "model.layers.0.linear_attn.in_proj_qkvz"]
    found = [(e.tensor.removeprefix("layers.0."), e.slices, e.box.start[0]) for e in mine]
    assert sorted(found) == [
        ("in_proj_qkv.A", (0, 1, 2), 0),
        ("in_proj_qkv.B", (0,), 0),
        ("in_proj_qkv.B", (1,), 18),
        ("in_proj_qkv.B", (2,), 36),
        ("in_proj_z.A", (3,), 0),
        ("in_proj_z.B", (3,), 0),
    ]


def test_deepseek_sites_go_to_the_modules_of_vllm():
    names = modules_of(make_spec(DEEPSEEK))
    assert [name.removeprefix("model.layers.1.") for name in names if ".1." in name] == [
        "self_attn.fused_qkv_a_proj",
        "self_attn.q_b_proj",
        "self_attn.o_proj",
        "mlp.experts",
        "mlp.shared_experts.gate_up_proj",
        "mlp.shared_experts.down_proj",
    ]


def test_deepseek_without_q_compression():
    model = DEEPSEEK | {"q_lora_rank": None}
    names = modules_of(make_spec(model, targets=("q_proj", "kv_a_proj")))
    assert "model.layers.0.self_attn.q_proj" in names
    assert "model.layers.0.self_attn.kv_a_proj_with_mqa" in names


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (QWEN1_5_MOE_A2_7B, ["mlp.experts", "mlp.shared_expert.gate_up_proj",
                             "mlp.shared_expert.down_proj"]),
        (MIXTRAL_8X7B, ["block_sparse_moe.experts"]),
        (GLM_4_5_AIR, ["mlp.experts", "mlp.shared_experts.gate_up_proj",
                       "mlp.shared_experts.down_proj"]),
    ],
)  # fmt: skip
def test_blocks_of_experts_have_their_familys_name(model, names):
    found = modules_of(
        make_spec(shrunk(model), targets=("q_proj", "experts.*", "*.down", "*.gate"))
    )
    last = "model.layers.3."
    assert [name.removeprefix(last) for name in found if name.startswith(last)] == [
        "self_attn.qkv_proj",
        *names,
    ]


def test_kv_b_proj_has_no_slot():
    spec = make_spec(DEEPSEEK, servable=False, targets=("kv_b_proj",))
    with pytest.raises(RefitError, match=r"layers.0.kv_b_proj has no adapter slot in vLLM: vLLM"):
        make_layouts(spec)


def test_a_tensor_that_experts_share_travels_once():
    shared = make_spec(expert_layout="shared_outer", rank=4, targets=("experts.*",))
    values = sent_values(shared, make_tensors(shared))
    assert values["layers.1.experts.gate.A"].shape == (4, 48)
    assert values["layers.1.experts.down.B"].shape == (48, 4)
    per_expert = make_spec(rank=4, targets=("experts.*",))
    assert make_layouts(shared)[0].nbytes < make_layouts(per_expert)[0].nbytes / 2


def test_bfloat16_is_rounded_as_torch_rounds():
    spec = make_spec(targets=("o_proj",), rank=4, alpha=4)
    tensors = make_tensors(spec)
    # Ties, subnormals, and the largest value that does not overflow.
    tensors["layers.0.o_proj.A"].flat[:4] = [1.00390625, 1.01171875, 1e-40, 3.38e38]
    got = sent_values(spec, tensors, "bfloat16")["layers.0.o_proj.A"]
    assert torch.equal(got, torch.from_numpy(tensors["layers.0.o_proj.A"]).bfloat16())


def test_a_box_for_several_engine_ranks_lies_once_in_a_part():
    spec = make_spec(rank=4)
    (layout,) = make_layouts(spec, engine=EngineLayout(slot_rank=8, tp=2))
    by_tensor = {}
    for entry in layout.entries:
        by_tensor.setdefault(entry.tensor, []).append(entry.targets)
    assert by_tensor["layers.1.q_proj.A"] == [(0, 1)]
    assert by_tensor["layers.1.q_proj.B"] == [(0,), (1,)]


def test_layouts_survive_json():
    layouts = make_layouts(make_spec(rank=3), TrainerConfig(world_size=4, tp=2, pp=2))
    assert parts.from_json(parts.to_json(layouts)) == layouts


def two_senders(seed: int = 0):
    spec = make_spec(rank=4)
    tensors = make_tensors(spec, seed)
    layouts = make_layouts(spec, TWO)
    return layouts, make_senders(layouts, spec, tensors, TWO)


def test_equal_adapters_have_equal_checksums_and_others_not():
    (_, a), (_, b), (_, other) = two_senders(), two_senders(), two_senders(seed=1)
    sums = [parts.version_checksum([s.send(1) for s in senders]) for senders in (a, b, other)]
    assert sums[0] == sums[1] != sums[2]
    other_version = parts.version_checksum([s.send(2) for s in reversed(a)])
    assert other_version == sums[0]


def test_a_sender_sends_what_its_tensors_hold_now():
    spec = make_spec(targets=("o_proj",), rank=4, alpha=4)
    tensors = make_tensors(spec)
    (layout,) = make_layouts(spec)
    values = {name: torch.from_numpy(value) for name, value in tensors.items()}
    held = {n: [(Box((0, 0), tuple(v.shape)), v)] for n, v in values.items()}
    sender = Sender(layout, held, {site.name: site.scale for site in spec}, shm.Outgoing())
    before = sender.send(1)
    values["layers.1.o_proj.B"].add_(1)
    after = sender.send(2)
    differing = [
        layout.entries[i].tensor
        for i, (a, b) in enumerate(zip(before.checksums, after.checksums, strict=True))
        if a != b
    ]
    assert differing == ["layers.1.o_proj.B"]


def test_one_changed_byte_is_found_and_named():
    layouts, senders = two_senders()
    sent = senders[1].send(3)
    entry = layouts[1].entries[5]
    senders[1].buffer[entry.offset + 7] ^= 1
    buffer = parts.open_part(sent.path, sent.nbytes)
    with pytest.raises(RefitError, match=f"checksum of {entry.tensor} from trainer rank 1"):
        parts.check_received(layouts[1], sent, buffer, range(len(layouts[1].entries)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda sent: sent[:1], r"trainer ranks \[1\] are missing"),
        (lambda sent: [*sent, sent[0]], r"parts came from trainer ranks \[0, 1, 0\]"),
        (
            lambda sent: [sent[0], dataclasses.replace(sent[1], version=4)],
            "trainer rank 1 sent adapter version 4 instead of 5",
        ),
        (
            lambda sent: [dataclasses.replace(sent[0], nbytes=64), sent[1]],
            "trainer rank 0 sent 64 bytes",
        ),
    ],
)
def test_parts_that_do_not_make_up_the_version_are_refused(change, message):
    layouts, senders = two_senders()
    sent = [sender.send(5) for sender in senders]
    parts.check_sent(layouts, sent, 5)
    with pytest.raises(RefitError, match=message):
        parts.check_sent(layouts, change(sent), 5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_not_sent(value, dtype):
    spec = make_spec(rank=4)
    tensors = make_tensors(spec)
    tensors["layers.1.experts.up.B"][3, 2, 1] = value
    layouts = make_layouts(spec, TWO, dtype=dtype)
    senders = make_senders(layouts, spec, tensors, TWO)
    senders[0].send(1)
    with pytest.raises(RefitError, match=r"layers.1.experts.up.B holds -?(nan|inf) at \[3, 2, 1\]"):
        senders[1].send(1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_largest_values_of_either_sign_are_finite(dtype):
    """Beside them, the smallest that are not."""
    bits = {"float32": 0x7F7FFFFF, "bfloat16": 0x7F7F}[dtype]
    storage = parts.STORAGE[dtype].newbyteorder("=").str.replace("f", "u")
    for sign in (0, 1 << (8 * np.dtype(storage).itemsize - 1)):
        values = np.array([0, 1, sign, sign | 1, sign | bits], storage)
        assert parts.all_finite(values.view(np.uint8), dtype)
        values[-1] += 1
        assert not parts.all_finite(values.view(np.uint8), dtype)


def test_a_value_that_overflows_its_dtype_is_not_sent():
    spec = make_spec(targets=("o_proj",), rank=4, alpha=8)
    tensors = make_tensors(spec)
    tensors["layers.0.o_proj.B"][1, 2] = 3e38  # times the scale, 2
    (layout,) = make_layouts(spec)
    (sender,) = make_senders([layout], spec, tensors, TrainerConfig())
    with pytest.raises(RefitError, match=r"layers.0.o_proj.B holds inf at \[1, 2\]"):
        sender.send(1)


def test_a_rank_without_what_the_plan_wants_of_it_is_refused():
    spec = make_spec(rank=4)
    (layout,) = make_layouts(spec)
    with pytest.raises(RefitError, match=r"rank 0 holds 0 of \d+ elements of layers.0.q_proj.A"):
        Sender(layout, {}, {site.name: site.scale for site in spec}, shm.Outgoing())


def test_a_part_goes_with_its_sender():
    _, senders = two_senders()
    sent = senders[0].send(1)
    os.close(senders[0].outgoing.descriptor)
    with pytest.raises(RefitError, match="one machine, in one container and as one user"):
        parts.open_part(sent.path, sent.nbytes)
    senders.clear()
    gc.collect()


@pytest.mark.parametrize(
    "memory", [lambda n: shm.Outgoing().memory(n, torch.device("cpu")), parts.host_memory]
)
def test_a_part_larger_than_memory_is_an_error(memory):
    with pytest.raises(RefitError, match="no room for"):
        memory(2**60)
