"""Settings that are told to whoever wants to train an adapter as it is."""

from __future__ import annotations

import shlex

import pytest
from published_configs import QWEN3_30B_A3B

from lora_moe_rl.adapters.spec import AdapterSpec, ModelShape
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import override
from lora_moe_rl.files.adapter_settings import settings_of

SHAPE = ModelShape.from_hf_config(QWEN3_30B_A3B | {"num_hidden_layers": 3})


@pytest.mark.parametrize(
    "settings",
    [
        ["adapter.rank=8"],
        ["adapter.rank=8", "adapter.alpha=16", "adapter.rslora=true"],
        ["adapter.rank=6", "adapter.alpha=7.123456789"],
        ["adapter.expert_layout=shared_outer"],
        ["adapter.targets=q_proj,experts.*", 'adapter.rank_pattern={"layers.1.q_proj": 4}'],
        ['adapter.alpha_pattern={"experts.down": 3.3}', "adapter.expert_rank=2"],
    ],
)
def test_they_make_the_same_adapter(settings):
    spec = AdapterSpec.build(SHAPE, override(RunConfig(), settings).adapter)
    words = shlex.split(" ".join(settings_of(spec)))
    assert AdapterSpec.build(SHAPE, override(RunConfig(), words).adapter) == spec
