"""Each transport into the real vLLM engine: the same version as through shared memory."""

from __future__ import annotations

import numpy as np
import pytest
import ray
from refit_ranks import make_layouts

from lora_moe_rl.config import TrainerConfig
from lora_moe_rl.errors import RefitError
from lora_moe_rl.refit.transports import directory
from lora_moe_rl.refit.transports.choose import SHARED_MEMORY, Wire, make_outgoing

pytestmark = pytest.mark.slow
TWO = TrainerConfig(world_size=2, pp=2)
# One: how several share a batch depends on when they come, and rounding on how they share it.
SEQUENCES = [[30 + i % 90 for i in range(40)]]


@pytest.mark.parametrize("kind", ["directory", "distributed"])
def test_a_version_is_the_same_by_every_transport(engine, kind, tmp_path):
    tensors = engine.random_adapter(seed=51)
    expected, _ = engine.score(SEQUENCES, engine.new_version(tensors))
    wire = Wire(kind, str(tmp_path) if kind == "directory" else "", timeout_s=20)
    layouts = make_layouts(engine.spec, TWO)
    version = next(engine.versions)
    senders, sent = engine.send(version, tensors, TWO)
    ray.get(engine.actor.prepare_refit.remote(layouts, wire))
    try:
        offered = [
            make_outgoing(wire, layout, "127.0.0.1").offer(part, sender.buffer)
            for layout, part, sender in zip(layouts, sent, senders, strict=True)
        ]
        if kind == "directory":  # all files are there, but not yet the manifest
            with pytest.raises(RefitError, match="version .* is not published"):
                engine.publish_parts(version, offered)
            directory.publish(tmp_path, offered)
        engine.publish_parts(version, offered)
        scores, _ = engine.score(SEQUENCES, version)
        assert ray.get(engine.actor.differing.remote(version, *offered)) == []
    finally:
        engine.prepared.clear()
        ray.get(engine.actor.prepare_refit.remote(layouts, SHARED_MEMORY))
    for ours, theirs in zip(scores, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
