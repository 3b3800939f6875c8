import json

import numpy as np
import pytest

from lora_moe_rl.bench import scale, scale_adapter, scale_parts
from lora_moe_rl.bench.scale_parts import PARTS, Part, Size
from lora_moe_rl.verify.inputs import drawn


def test_the_exponent_is_the_slope_on_logarithms():
    sizes = [10, 20, 40, 80]
    assert scale.exponent(sizes, [0.3 * n for n in sizes], 0) == pytest.approx(1.0)
    assert scale.exponent(sizes, [2.0 * n**2 for n in sizes], 0) == pytest.approx(2.0)
    assert scale.exponent(sizes, [5.0] * 4, 0) == pytest.approx(0.0)
    # By hand: of the points (0, 0), (1, 1) and (2, 3) in powers of two the slope is 3/2.
    assert scale.exponent([1, 2, 4], [1, 2, 8], 0) == pytest.approx(1.5)
    assert scale.exponent(sizes, [1e-6 * n**2 for n in sizes], negligible=1.0) == 0.0


@pytest.mark.parametrize("power, met", [(1.0, True), (1.05, True), (1.15, False), (2.0, False)])
def test_what_grows_too_fast_is_named_and_fails(monkeypatch, capsys, power, met):
    monkeypatch.setattr(scale, "busy_cores", lambda: 0.0)
    monkeypatch.setattr(scale, "_seconds", lambda work: work())
    monkeypatch.setattr(scale, "_peak", lambda work: 1 << 20)
    part = Part(lambda size: lambda: float(size.samples) ** power, ("samples", "ranks"))
    monkeypatch.setattr(scale, "PARTS", {"planted": part})
    assert scale.main(["--samples", "1280", "--rounds", "1", "--json"]) == (0 if met else 1)
    result = json.loads(capsys.readouterr().out)
    assert result["parts"]["planted"]["samples"]["sizes"] == [80, 160, 320, 640, 1280]
    found = {name: one["met"] for name, one in result["goals"].items()}
    assert found.pop("planted, seconds against samples") is met
    assert all(found.values()) and len(found) == 3
    scale.main(["--samples", "1280", "--rounds", "1"])
    printed = capsys.readouterr().out
    assert "planted, seconds against samples" in printed and ("missed" in printed) is not met


def test_the_best_of_several_rounds_counts(monkeypatch):
    taken = iter([3.0, 1.0, 2.0, 9.0, 4.0, 8.0])
    monkeypatch.setattr(scale, "_seconds", lambda work: next(taken))
    monkeypatch.setattr(scale, "_peak", lambda work: 1)
    grown = scale.growth(lambda size: lambda: None, [Size(8), Size(16)], [8, 16], rounds=3)
    assert grown["seconds"] == [1.0, 4.0] and grown["exponent"]["seconds"] == pytest.approx(2.0)


MEGATRON = {"replay"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.seconds) if n in MEGATRON else n for n in PARTS],
)
def test_every_part_does_its_work_at_any_size(name):
    for size in (Size(16, ranks=1), Size(48, ranks=4, engines=2, layers=4, experts=8)):
        PARTS[name].prepare(size)()


def test_the_parts_work_on_all_samples():
    size = Size(48, ranks=2, engines=3)
    batch, plan = scale_parts.batch(size)(), scale_parts.plan(size)()
    assert len(batch.token_ids) == 48
    assert sorted(i for rank in plan for chunk in rank for i in chunk) == list(range(48))
    packed = [i for one in scale_parts.packing(size)() for i in one.samples]
    assert sorted(packed) == sorted(i for chunk in plan[0] for i in chunk)
    sent = scale_parts.routes(size)()
    assert [part.num_samples for part in sent] == [16, 16, 16]
    assert sum(part.num_rows for part in sent) == batch.lengths().sum()
    assert len(scale_parts.routes(Size(48))()) == 48 // scale_parts.GROUP


def test_the_parts_of_the_adapter_are_of_all_its_tensors():
    size = Size(16, ranks=2, layers=3, experts=4)
    spec, tensors = scale_adapter.reading(size)()
    # By hand: 4 linears of attention; the first layer's MLP, then the experts' and a shared one.
    assert len(list(spec)) == 3 * 4 + 3 + 2 * (3 + 3)
    assert tensors["layers.2.experts.down.A"].shape == (4, 2, 32)
    for name, values in drawn(spec.tensor_shapes, seed=0).items():
        np.testing.assert_array_equal(tensors[name], values)
    layouts = scale_adapter.refit_plan(size)()
    assert [layout.source for layout in layouts] == [0, 1]
    sent = scale_adapter.sending(size)()
    assert len(sent.checksums) == len(set(sent.checksums)) and sent.version == 1
    assert scale_adapter.sending(size)().checksums == sent.checksums
