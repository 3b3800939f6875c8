"""In which order a run's ranks take the nodes that it was given."""

from __future__ import annotations

from lora_moe_rl.cluster.placement import node_by_node


def test_ranks_that_follow_each_other_share_a_node():
    assert node_by_node(["x", "y", "x", "z", "y", "x"]) == [0, 2, 5, 1, 4, 3]
    assert node_by_node(["x"] * 3) == [0, 1, 2]
