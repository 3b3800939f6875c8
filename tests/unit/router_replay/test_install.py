"""Routes of a micro-batch reach the layers of a chunk."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lora_moe_rl.kernels.route_codec import RowLayout, pack_array

replay = pytest.importorskip("lora_moe_rl.router_replay.replay")


class Layer:
    def set_target(self, ids_of, counted, free, sizes) -> None:
        self.ids, self.counted, self.free = ids_of(), counted, free


def test_which_rows_are_valid_goes_to_the_device_once_and_each_layer_has_its_own(monkeypatch):
    sent = []
    right = replay.on_device

    def on_device(values, device):
        sent.append(tuple(values.shape))
        assert values.is_contiguous()
        return right(values, device)

    monkeypatch.setattr(replay, "on_device", on_device)
    rng = np.random.default_rng(0)
    layout, tokens = RowLayout(3, 2, 8), 5
    ids = rng.integers(0, 8, (tokens, 3, 2))
    valid, known = rng.random((tokens, 3)) < 0.5, np.array([True] * 4 + [False])
    routes = replay.MicroRoutes((1, 4, 7), layout, (pack_array(ids, layout),), known, valid)
    one = object.__new__(replay.Replay)
    one.chunks = [{number: Layer() for number in routes.layers}]
    one.install(0, routes, None, torch.device("cpu"))
    assert sent == [(5,), (3, 5)]
    for column, layer in enumerate(one.chunks[0].values()):
        assert layer.ids.tolist() == ids[:, column].tolist()
        assert layer.counted.tolist() == (known & valid[:, column]).tolist()
        assert layer.free.tolist() == (known & ~valid[:, column]).tolist()
