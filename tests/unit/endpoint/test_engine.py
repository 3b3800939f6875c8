"""What `lora-moe-rl serve` serves by which name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lora_moe_rl.config import RunConfig
from lora_moe_rl.endpoint.bodies import Asked, Sampling, version_in
from lora_moe_rl.endpoint.engine import Served
from lora_moe_rl.endpoint.refusal import Refused

pytestmark = pytest.mark.seconds  # imports torch


def served(*versions: int) -> Served:
    engine = SimpleNamespace(receipts=dict.fromkeys(versions))
    return Served(engine, RunConfig(model={"max_length": 64}), None)


@pytest.mark.parametrize(
    ("model", "name", "version"),
    [("policy", "policy@12", 12), ("policy@12", "policy@12", 12), ("policy@9", "policy@9", 9),
     ("base", "base", None)],
)  # fmt: skip
def test_versions_are_models_and_so_is_the_base(model, name, version):
    source = served(9, 12)
    assert source.models() == ["policy", "policy@9", "policy@12", "base"]
    found, policy = source.policy(Asked(model, Sampling()))
    assert (found, policy.version) == (name, version)


@pytest.mark.parametrize("model", ["policy@7", "policy@", "policy@012", "gpt-4o", ""])
def test_a_version_that_is_gone_is_refused_with_those_that_are_there(model):
    with pytest.raises(Refused, match="policy@9, policy@12, base") as refused:
        served(9, 12).policy(Asked(model, Sampling()))
    assert refused.value.status == 404


def test_a_model_alone_has_no_policy():
    assert served().models() == ["base"]
    with pytest.raises(Refused, match="no model policy here; there are base"):
        served().policy(Asked("policy", Sampling()))


@pytest.mark.parametrize(
    ("model", "version"),
    [("policy@12", 12), ("policy@0", 0), ("policy@", None), ("policy@012", None), ("base", None),
     ("policy@-1", None), ("policy@\u0663", None), ("policy@" + "9" * 5000, None)],
)  # fmt: skip
def test_a_version_is_named_in_one_way(model, version):
    assert version_in(model) == version
