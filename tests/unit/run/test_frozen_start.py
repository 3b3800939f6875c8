"""The adapter that a run is measured against with algorithm.reference=start, found again."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_families

from lora_moe_rl.adapters import peft
from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import with_settings
from lora_moe_rl.errors import RunDirError
from lora_moe_rl.files.checkpoint import Found
from lora_moe_rl.files.untrusted import read_json
from lora_moe_rl.run import adapter_start
from lora_moe_rl.run.frozen_start import FrozenStart
from lora_moe_rl.verify.inputs import random_adapter


class Place:
    """A base, an adapter on it, and a run that starts from that."""

    def __init__(self, folder: Path):
        tiny_families.save("qwen3_moe", folder / "base")
        self.adapter = folder / "adapter"
        self.hf_config = read_json(folder / "base/config.json")
        shape = ModelShape.from_hf_config(self.hf_config)
        sections = {"rank": 2, "init_from": str(self.adapter)}
        self.config = RunConfig.model_validate(
            {
                "model": str(folder / "base"),
                "adapter": sections,
                "algorithm": {"name": "dpo", "reference": "start"},
            }
        )
        self.spec = AdapterSpec.build(shape, self.config.adapter)
        self.model_dir = folder / "base"
        self.write(seed=1)

    def write(self, seed: int) -> None:
        shutil.rmtree(self.adapter, ignore_errors=True)
        peft.write(self.adapter, self.spec, random_adapter(self.spec, seed), self.config)

    def found(self, **metadata) -> Found:
        known = {
            "adapter": self.config.adapter.model_dump(mode="json"),
            "base": {"path": "base", "config": self.hf_config, "fingerprint": ""},
        }
        return Found(Path("step-000002"), known | metadata, [])

    def of_run(self, start=None, found=None, **settings) -> FrozenStart | None:
        config = with_settings(self.config, settings)
        shape = self.spec.shape
        spec = AdapterSpec.build(shape, config.adapter)
        ready = SimpleNamespace(config=config, spec=spec, model_dir=self.model_dir)
        return FrozenStart.of_run(ready, start, found)


@pytest.fixture
def place(tmp_path) -> Place:
    return Place(tmp_path)


def test_it_is_what_the_run_begins_with_and_read_again_for_ranks_that_start_anew(place):
    start = adapter_start.init_from(place.config, place.spec, place.model_dir)
    frozen = place.of_run(start)
    assert frozen is not None and frozen.digest == start.digest
    for _ in range(2):
        found = frozen.read()
        for name, wanted in random_adapter(place.spec).items():
            np.testing.assert_array_equal(found[name], wanted)
    place.write(seed=2)
    with pytest.raises(RunDirError, match="holds another adapter .* than when the run began"):
        frozen.read()


def test_a_run_that_goes_on_finds_the_same_one(place, tmp_path):
    first = place.of_run()
    assert first is not None
    found = place.found(reference=first.digest)
    again = place.of_run(found=found)
    assert again is not None and again.digest == first.digest
    elsewhere = tmp_path / "elsewhere"
    shutil.move(place.adapter, elsewhere)
    with pytest.raises(RunDirError) as caught:
        place.of_run(found=found)
    for told in (f"adapter.init_from={place.adapter}", "cannot be read", "put it back"):
        assert told in str(caught.value)
    moved = place.of_run(found=found, adapter={"init_from": str(elsewhere)})
    assert moved is not None and moved.digest == first.digest
    place.write(seed=2)
    with pytest.raises(RunDirError, match="than when step-000002 was written .*reference=base"):
        place.of_run(found=found)


def test_a_run_that_went_to_other_ranks_at_its_start_finds_the_same_one(place):
    """config.yaml asks for adapter.resize no more once a checkpoint has the new ranks."""
    other = {"rank": 4, "alpha": 8.0}
    first = place.of_run(adapter=other | {"resize": True})
    assert first is not None
    wanted = first.read()
    metadata = {"adapter": place.config.adapter.model_dump(mode="json") | other}
    found = place.found(reference=first.digest, **metadata)
    again = place.of_run(found=found, adapter=other)
    assert again is not None and again.digest == first.digest
    for _ in range(2):  # also for ranks that start anew
        read = again.read()
        assert read.keys() == wanted.keys()
        for name, value in wanted.items():
            np.testing.assert_array_equal(read[name], value)
    unknown = place.found(**metadata)
    with pytest.raises(RunDirError, match="has other ranks than this run.*adapter.resize=true"):
        place.of_run(found=unknown, adapter=other)


def test_another_scale_is_another_adapter(place):
    tensors = random_adapter(place.spec)
    config = with_settings(place.config, {"adapter": {"alpha": 16.0}})
    other = AdapterSpec.build(place.spec.shape, config.adapter)
    digests = {adapter_start.digest_of(spec, tensors) for spec in (place.spec, other)}
    assert len(digests) == 2


def test_a_run_measured_against_its_base_has_none(place):
    place.write(seed=1)
    assert place.of_run(algorithm={"reference": "base"}) is None
    shutil.rmtree(place.adapter)
    assert place.of_run(algorithm={"reference": "base"}) is None


def test_a_checkpoint_that_knows_none_is_told_of(place, capsys):
    assert place.of_run(found=place.found()) is not None
    said = " ".join(capsys.readouterr().out.split())
    assert "until step-000002 the run was not measured against a start" in said


def test_ranks_that_change_are_refused(place):
    with pytest.raises(RunDirError, match="other ranks than this run.*would be changed to them"):
        place.of_run(found=place.found(), adapter={"rank": 4, "resize": True})
