"""The step of `bench prompts`: a group's samples have one prompt, on one set of routes."""

from types import SimpleNamespace

import numpy as np

from lora_moe_rl.bench.prompts import step_of
from lora_moe_rl.data.packing import pack


def test_the_samples_of_a_group_begin_alike_and_no_others():
    shape = SimpleNamespace(vocab_size=50, moe_layers=(0, 1), num_experts=8, top_k=2)
    batch, routes = step_of(shape, prompt=5, groups=2, samples=3, tokens=4)
    assert batch.lengths().tolist() == [8] * 6 and routes.offsets.tolist() == list(range(0, 49, 8))
    packed = pack(batch, range(6), multiple=1)
    assert len(packed.fed) == 2 * (8 + 2 * 3) == batch.fed_together(range(6))
    fed = packed.fed[packed.fed_at]
    np.testing.assert_array_equal(packed.input_ids, packed.input_ids[fed])
    np.testing.assert_array_equal(routes.ids, routes.ids[fed])
    assert (routes.ids[:5] != routes.ids[24:29]).any()
