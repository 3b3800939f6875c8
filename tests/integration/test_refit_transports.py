"""Each transport into the real vLLM engine: the same version as through shared memory."""

from __future__ import annotations

import numpy as np
import pytest
import ray
from refit_ranks import make_layouts, make_senders
from transport_ranks import make_channel, publish

from lora_moe_rl.config import TrainerConfig
from lora_moe_rl.errors import RefitError
from lora_moe_rl.refit.transports.shm import SHARED_MEMORY

pytestmark = pytest.mark.slow
TWO = TrainerConfig(world_size=2, pp=2)
# One: how several share a batch depends on when they come, and rounding on how they share it.
SEQUENCES = [[30 + i % 90 for i in range(40)]]


@pytest.mark.parametrize("kind", ["directory", "distributed", "nixl"])
def test_a_version_is_the_same_by_every_transport(engine, kind, tmp_path):
    tensors = engine.random_adapter(seed=51)
    expected, _ = engine.score(SEQUENCES, engine.new_version(tensors))
    channel = make_channel(kind, tmp_path)
    layouts = make_layouts(engine.spec, TWO)
    version = next(engine.versions)
    senders = make_senders(layouts, engine.spec, tensors, TWO, channel)
    ray.get(engine.actor.prepare_refit.remote(layouts, channel))
    try:
        offered = [sender.send(version) for sender in senders]
        if kind == "directory":  # all files are there, but not yet the manifest
            with pytest.raises(RefitError, match="version .* is not published"):
                engine.publish_parts(version, offered)
        publish(channel, offered)
        engine.publish_parts(version, offered)
        scores, _ = engine.score(SEQUENCES, version)
        assert ray.get(engine.actor.differing.remote(version, *offered)) == []
    finally:
        engine.prepared.clear()
        ray.get(engine.actor.prepare_refit.remote(layouts, SHARED_MEMORY))
    for ours, theirs in zip(scores, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
