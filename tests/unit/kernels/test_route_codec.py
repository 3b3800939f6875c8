"""The route codec against its reference."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, INTERPRETER, KERNEL, poison_empty

from lora_moe_rl.kernels.route_codec import RowLayout, naive, op, pack_array, unpack_array
from lora_moe_rl.kernels.route_codec.op import layer_ids

LAYOUTS = [
    RowLayout(3, 2, 8),  # 18 bits: rows end within a byte
    RowLayout(4, 8, 128),
    RowLayout(2, 8, 256),
    RowLayout(5, 3, 384),  # 15 ids: not whole groups of 8
    RowLayout(2, 4, 512),
    RowLayout(1, 1, 1),
    RowLayout(3, 5, 1000),
    RowLayout(2, 3, 2**15),
]


def random_ids(layout, tokens=9, seed=0):
    rng = np.random.default_rng(seed)
    shape = (tokens, layout.num_layers, layout.top_k)
    ids = rng.integers(0, layout.num_experts, shape)
    ids[-1] = layout.num_experts - 1
    return ids


def test_bytes_a_token():
    assert RowLayout(48, 8, 128).row_bytes == 336
    assert RowLayout(60, 8, 384).row_bytes == 540
    assert RowLayout(3, 2, 8).row_bytes == 3


@pytest.mark.skipif(INTERPRETER, reason="of numpy")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_packs_and_unpacks_as_the_reference(layout):
    ids = random_ids(layout)
    expected = naive.pack(ids, layout)
    assert np.array_equal(naive.unpack(expected, layout), ids)
    assert np.array_equal(pack_array(ids, layout), expected)
    assert np.array_equal(unpack_array(expected, layout), ids)


@pytest.mark.parametrize("layout", [*LAYOUTS, RowLayout(8, 8, 384), RowLayout(3, 6, 64)], ids=str)
def test_one_layer_unpacks_as_the_reference(monkeypatch, layout):
    ids = random_ids(layout)
    packed = torch.from_numpy(naive.pack(ids, layout)).to(DEVICE)
    poison_empty(monkeypatch)
    for layer in range(layout.num_layers):
        got = layer_ids(packed, layer, layout, KERNEL)
        assert got.dtype == torch.int64
        assert np.array_equal(got.cpu().numpy(), ids[:, layer])


@pytest.mark.skipif(INTERPRETER, reason="of numpy")
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    layers=st.integers(1, 6),
    top_k=st.integers(1, 9),
    experts=st.integers(1, 2**15),
    tokens=st.integers(0, 5),
)
def test_arrays_of_any_layout(layers, top_k, experts, tokens):
    layout = RowLayout(layers, top_k, experts)
    ids = np.random.default_rng(tokens).integers(0, experts, (tokens, layers, top_k))
    packed = pack_array(ids.astype(np.uint16), layout)
    assert np.array_equal(packed, naive.pack(ids, layout))
    got = unpack_array(packed, layout)
    assert np.array_equal(got, ids) and got.dtype == (np.uint16 if experts > 256 else np.uint8)
    rows = torch.from_numpy(packed)
    for layer in range(layers):
        assert np.array_equal(layer_ids(rows, layer, layout), ids[:, layer])
        on_device = op._without_triton(rows, layer, layout)  # a device without Triton
        assert np.array_equal(on_device, ids[:, layer])


@pytest.mark.filterwarnings("error")
def test_layers_of_rows_that_cannot_be_written_to():
    layout = RowLayout(3, 6, 64)
    ids = random_ids(layout)
    rows = naive.pack(ids, layout)
    rows.setflags(write=False)
    ids_of = op.by_layer(rows, layout, torch.device(DEVICE))
    for layer in range(layout.num_layers):
        assert np.array_equal(ids_of(layer).cpu().numpy(), ids[:, layer])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_tokens_of_each_expert_are_counted(layout):
    ids = random_ids(layout)
    counts = op.expert_counts(naive.pack(ids, layout), layout, torch.device(DEVICE))
    assert counts.dtype == torch.int64
    for layer, found in enumerate(counts):
        expected = np.bincount(ids[:, layer].ravel(), minlength=layout.num_experts)
        assert np.array_equal(found.cpu().numpy(), expected)


@pytest.mark.skipif(INTERPRETER, reason="of the plain path")
@pytest.mark.parametrize("broken", ["bits", "order", "last id"])
def test_a_broken_codec_is_noticed(broken):
    layout = RowLayout(3, 3, 384)
    ids = random_ids(layout)
    expected = naive.pack(ids, layout)
    if broken == "bits":
        ids = ids & 255
    elif broken == "order":
        ids = ids[:, :, ::-1]
    else:
        ids = ids.copy()
        ids[:, -1, -1] = 0
    assert not np.array_equal(pack_array(ids, layout), expected)


@pytest.mark.skipif(INTERPRETER, reason="of the plain path")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: pack_array(np.full((2, 3, 2), 8), LAYOUTS[0]), "expert id 8 is not one of 8"),
        (lambda p: pack_array(np.full((2, 3, 2), -1), LAYOUTS[0]), "expert id -1 is not one of"),
        (lambda p: pack_array(np.zeros((2, 2, 3), int), LAYOUTS[0]), r"\(2, 2, 3\), not"),
        (lambda p: unpack_array(np.zeros((2, 4), np.uint8), LAYOUTS[0]), r"not \(tokens, 3\)"),
        (lambda p: RowLayout(1, 1, 2**16), "experts 1 to 32768"),
        (lambda p: layer_ids(p, 3, LAYOUTS[0]), "layer 3 is not one of the 3"),
        (lambda p: layer_ids(p, -1, LAYOUTS[0]), "layer -1 is not one of the 3"),
        (lambda p: layer_ids(p[:, :2], 0, LAYOUTS[0]), r"not \(tokens, 3\)"),
    ],
)
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(2, 3, dtype=torch.uint8))
