"""Experts that vLLM lays out for Marlin's kernels: what its own model has after its own loading and
processing is what is held, in no other memory, and it is taken a layer at a time."""

from __future__ import annotations

import multiprocessing
import socket

import pytest
from marlin_engine import load
from quantised import make_pair

SPAWN = multiprocessing.get_context("spawn")
SIZES = {"hidden_size": 128, "moe_intermediate_size": 64}
pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def engine(folder, model, form, tp):
    """What each worker of an engine has found."""
    answers, end, port = SPAWN.Queue(), SPAWN.Event(), free_port()
    workers = [
        SPAWN.Process(
            target=load, args=(folder, str(model), form, rank, tp, port, answers, end, False)
        )
        for rank in range(tp)
    ]
    for one in workers:
        one.start()
    try:
        return dict(answers.get(timeout=900) for _ in workers)
    finally:
        end.set()
        for one in workers:
            one.join(60)


@pytest.mark.parametrize(
    ("form", "name", "tp"),
    [
        ("int4", "qwen3_moe", 1),
        ("mxfp4", "qwen3_moe", 1),
        pytest.param("int4", "deepseek_v3", 2, marks=pytest.mark.whole),
    ],
)
def test_what_vllm_has_laid_out_is_what_is_held(form, name, tp, tmp_path):
    model, _ = make_pair(name, tmp_path / "model", form, **SIZES)
    (tmp_path / "held").mkdir()
    for seen in engine(str(tmp_path / "held"), model, form, tp).values():
        assert isinstance(seen, list), seen
        layers = [number for number, _ in seen]
        assert layers == sorted(layers) and len(layers) > 1
        for done, (_, memory) in enumerate(seen):
            assert all(memory[:done]) and max(memory[done:]) < 100, (done, memory)
