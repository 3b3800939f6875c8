"""Routes on their way: large parts stand beside what is handed on, and outlive who made them."""

from __future__ import annotations

import numpy as np
import pytest
import ray

from lora_moe_rl.cluster.ray_start import local_ray
from lora_moe_rl.router_replay.table import RouteTable
from lora_moe_rl.router_replay.travel import Beside, put_together, send, taken_apart

pytestmark = pytest.mark.seconds  # starts Ray
LAYERS, EXPERTS, TOP_K = (0, 2, 3), 64, 8
PIECES = [(0,), (2, 3)]


def a_table(lengths: list[int]) -> RouteTable:
    keys = np.random.default_rng(0).random((sum(lengths), len(LAYERS), EXPERTS))
    ids = np.split(np.argsort(keys, axis=-1)[..., :TOP_K], np.cumsum(lengths)[:-1])
    return RouteTable.build(ids, lengths, LAYERS, EXPERTS, TOP_K)


def equal(found: RouteTable, wanted: RouteTable) -> bool:
    names = ("ids", "valid", "offsets")
    same = [np.array_equal(getattr(found, name), getattr(wanted, name)) for name in names]
    return all(same) and found.layers == wanted.layers


class Maker:
    def sample(self, lengths: list[int], places: int):
        apart, large = taken_apart(send(a_table(lengths), PIECES), places)
        return apart, *large


@pytest.fixture
def maker():
    if started := not ray.is_initialized():
        local_ray(1)
    actor = ray.remote(Maker).options(num_cpus=0).remote()
    yield actor
    ray.kill(actor)
    if started:
        ray.shutdown()


def test_small_parts_are_in_what_is_handed_on_and_large_ones_beside_it():
    table = a_table([3000, 5])
    apart, large = taken_apart(send(table, PIECES, block_bytes=1), places=4)
    beside = [[isinstance(part, Beside) for part in block.parts] for block in apart.blocks]
    assert beside == [[True, True], [False, False]]
    assert [part is None for part in large] == [False, False, True, True]
    assert equal(put_together(apart, large).table(), table)


def test_too_few_places_are_an_error_and_no_loss():
    with pytest.raises(ValueError, match="2 parts of routes have no room in 1 places"):
        taken_apart(send(a_table([3000]), PIECES), places=1)


def test_routes_are_there_when_the_engine_that_made_them_has_ended(maker):
    """Not so when it puts them into the object store itself: they are its own then."""
    lengths = [3000, 4000]
    apart, *refs = maker.sample.options(num_returns=5).remote(lengths, 4)
    handed_on = put_together(ray.get(apart), refs)
    ray.kill(maker)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(maker.sample.options(num_returns=5).remote(lengths, 4)[0])
    assert equal(handed_on.table(), a_table(lengths))
