"""Assembly of canonical tensors from the slices of trainer ranks."""

import numpy as np
import pytest

from lora_moe_rl.adapters.shards import Shard, assemble
from lora_moe_rl.errors import AdapterError

SHAPES = {"a": (4, 6), "b": (3, 4, 5)}


def whole() -> dict[str, np.ndarray]:
    return {
        name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        for name, shape in SHAPES.items()
    }


def cut(tensors: dict[str, np.ndarray]) -> list[Shard]:
    """`a` split by columns, `b` by experts and rows."""
    a, b = tensors["a"], tensors["b"]
    return [
        Shard("a", (0, 0), a[:, :2]),
        Shard("a", (0, 2), a[:, 2:]),
        Shard("b", (0, 0, 0), b[:2, :3]),
        Shard("b", (0, 3, 0), b[:2, 3:]),
        Shard("b", (2, 0, 0), b[2:]),
    ]


def test_slices_make_the_whole_in_any_order():
    shards = cut(whole())
    for name, tensor in assemble(SHAPES, reversed(shards)).items():
        np.testing.assert_array_equal(tensor, whole()[name])
        assert tensor.dtype == np.float32


def test_a_whole_tensor_is_not_copied():
    tensors = whole()
    shards = [Shard(name, (0,) * value.ndim, value) for name, value in tensors.items()]
    assert np.shares_memory(assemble(SHAPES, shards)["b"], tensors["b"])


def test_a_missing_slice_is_counted():
    shards = [s for s in cut(whole()) if s.start != (0, 3, 0)]
    part = Shard("b", (0, 3, 1), whole()["b"][:2, 3:, 1:3])  # 4 of the 10 elements
    with pytest.raises(AdapterError, match="tensor b: 6 elements missing"):
        assemble(SHAPES, [*shards, part])


def test_a_missing_tensor_is_an_error():
    with pytest.raises(AdapterError, match="tensor a: 24 elements missing"):
        assemble(SHAPES, cut(whole())[2:])


def test_a_slice_sent_twice_is_an_error():
    with pytest.raises(AdapterError, match="tensor a: 0 elements missing, 8 sent more than once"):
        assemble(SHAPES, [*cut(whole()), cut(whole())[0]])


def test_a_whole_tensor_sent_twice_is_an_error():
    twice = [Shard("a", (0, 0), whole()["a"])] * 2
    with pytest.raises(AdapterError, match="24 sent more than once"):
        assemble({"a": SHAPES["a"]}, twice)


@pytest.mark.parametrize(
    "shard, message",
    [
        (Shard("c", (0, 0), np.zeros((4, 6))), "c is not part"),
        (Shard("a", (1, 0), np.zeros((4, 6))), "leaves the shape"),
        (Shard("a", (0, -1), np.zeros((4, 6))), "leaves the shape"),
        (Shard("a", (0, 0, 0), np.zeros((1, 4, 6))), "a slice of shape"),
    ],
)
def test_a_slice_that_does_not_fit_is_an_error(shard, message):
    with pytest.raises(AdapterError, match=message):
        assemble({"a": SHAPES["a"]}, [shard])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_an_error(value):
    tensors = whole()
    tensors["b"][1, 2, 3] = value
    with pytest.raises(AdapterError, match="tensor b holds NaN or infinite"):
        assemble(SHAPES, cut(tensors))
