"""Mends of other packages refuse another version than the one they were written against."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from lora_moe_rl.errors import ConfigError
from lora_moe_rl.rollout.facts import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE
from lora_moe_rl.trainer import megatron_on_cpu
from lora_moe_rl.upstream import versions

PACKAGE = Path(__file__).parents[3] / "lora_moe_rl"
LINEAR = None, SimpleNamespace(linear_attention_freq=[1])
UNCOMPRESSED = SimpleNamespace(multi_latent_attention=True, q_lora_rank=None)
# Where it is relied on: (package, file, a call that does).
MENDS = [
    ("vllm", "refit/slots.py", lambda m: m.check_vllm()),
    ("vllm", "refit/merged_vllm.py", lambda m: m.check_vllm()),
    ("vllm", "rollout/forked.py", lambda m: m.install(1)),
    ("vllm", "rollout/gathered_outputs.py", lambda m: m.install()),
    ("vllm", "rollout/gathered_requests.py", lambda m: m.install()),
    ("vllm", "rollout/one_by_one.py", lambda m: m.install()),
    ("vllm", "rollout/draft_config.py", lambda m: m.install()),
    ("vllm", "rollout/cpu_drafts.py", lambda m: m.install()),
    ("vllm", "rollout/stop_strings.py", lambda m: m.give_tokenizer(None, None)),
    ("vllm", "rollout/late_inductor.py", lambda m: m.import_vllm()),
    ("vllm", "rollout/cpu_lora.py", lambda m: m.install()),
    ("vllm", "rollout/cpu_delta.py", lambda m: m.install()),
    ("vllm", "rollout/cpu_experts.py", lambda m: m.install()),
    ("vllm", "rollout/cpu_int4.py", lambda m: m.install()),
    ("vllm", "rollout/cpu_mxfp4.py", lambda m: m.install()),
    ("vllm", "rollout/cpu_fp8.py", lambda m: m.install()),
    ("vllm", "rollout/cpu_cache.py", lambda m: m.install()),
    ("vllm", "rollout/cpu_router.py", lambda m: m.install()),
    ("vllm", "rollout/cpu_routes.py", lambda m: m.install()),
    ("vllm", "rollout/cpu_vision.py", lambda m: m.install()),
    ("vllm", "rollout/forked.py", lambda m: m.install(1)),
    ("vllm", "rollout/cpu_dp.py", lambda m: m.install()),
    ("vllm", "rollout/dp_lora.py", lambda m: m.install()),
    ("vllm", "rollout/left_out.py", lambda m: m.install(())),
    ("vllm", "rollout/dp_ranks.py", lambda m: m.check_vllm()),
    ("vllm", "rollout/spread.py", lambda m: m.check_vllm()),
    ("vllm", "base/loader.py", lambda m: m.install()),
    ("megatron-core", "trainer/megatron_on_cpu.py", lambda m: m.install()),
    ("megatron-core", "trainer/local_modules.py", lambda m: m.install()),
    ("megatron-core", "trainer/local_modules.py", lambda m: m.localize(None)),
    ("megatron-core", "trainer/local_modules.py", lambda m: m.replicate_mla_down_projections(None)),
    ("megatron-core", "trainer/grouped_topk.py", lambda m: m.install(2)),
    ("megatron-core", "trainer/corrected_softmax.py", lambda m: m.install(None)),
    ("megatron-core", "trainer/mla_query.py", lambda m: m.without_query_norm(None, UNCOMPRESSED)),
    (
        "megatron-core",
        "trainer/linear_attention.py",
        lambda m: m.with_linear_attention(*LINEAR),
    ),
    ("megatron-core", "trainer/norm_over_heads.py", lambda m: m.placed(None)),
    ("megatron-core", "router_replay/replay.py", lambda m: m.Replay([], ())),
    ("megatron-core", "router_replay/audit.py", lambda m: m.Audit(None)),
    ("megatron-core", "router_replay/dispatch.py", lambda m: m.Dispatch(0, None)),
    ("megatron-bridge", "trainer/bridge.py", lambda m: m.load()),
]


@pytest.mark.parametrize(("package", "file", "call"), MENDS)
def test_a_mend_refuses_another_version(package, file, call, monkeypatch):
    megatron_on_cpu.install()  # before anything imports Megatron
    module = import_module("lora_moe_rl." + file.removesuffix(".py").replace("/", "."))
    monkeypatch.setattr(versions, "installed", lambda name: "99.0.1")
    known = versions.TESTED[package]
    with pytest.raises(ConfigError, match=rf"{file} knows {package} {known}, but 99.0.1 is inst"):
        call(module)


def test_every_file_that_mends_something_is_in_the_list():
    files = [file.relative_to(PACKAGE) for file in PACKAGE.glob("*/*.py")]
    mends = {
        str(file)
        for file in files
        if re.search(r"^ +require_version\(", (PACKAGE / file).read_text(), re.MULTILINE)
    }
    assert mends == {file for _, file, _ in MENDS}


def test_a_version_stands_once():
    written = {versions.TESTED[package] for package, _, _ in MENDS}
    for file in PACKAGE.glob("*/*.py"):
        if file.name != "versions.py":
            assert not [v for v in written if f'"{v}"' in file.read_text()], file


def test_the_packed_rotary_embedding_is_what_mcore_calls(monkeypatch):
    megatron_on_cpu.install()
    local_modules = import_module("lora_moe_rl.trainer.local_modules")
    rope_utils = local_modules.rope_utils
    monkeypatch.setattr(rope_utils, "_apply_rotary_pos_emb_thd", local_modules._rope_upstream)
    local_modules.install()
    assert rope_utils._apply_rotary_pos_emb_thd is local_modules._rope_packed

    monkeypatch.setattr(rope_utils, "_apply_rotary_pos_emb_thd", local_modules._rope_upstream)
    monkeypatch.setattr(local_modules.mla_module, "apply_rotary_pos_emb", lambda t: t)
    with pytest.raises(ConfigError, match="multi_latent_attention to use rope_utils.apply_rotary"):
        local_modules.install()
    monkeypatch.undo()
    monkeypatch.setattr(rope_utils, "apply_rotary_pos_emb", lambda t: t)
    with pytest.raises(ConfigError, match="to look up _apply_rotary_pos_emb_thd"):
        local_modules.install()
    monkeypatch.undo()
    monkeypatch.setattr(local_modules, "_rope_upstream", lambda t, freqs: t)
    with pytest.raises(ConfigError, match="the upstream code has changed"):
        local_modules.install()


def test_vllm_takes_the_temperatures_that_the_config_takes():
    sampling_params = import_module("vllm.sampling_params")
    for given in (LOWEST_TEMPERATURE / 2, LOWEST_TEMPERATURE):
        found = sampling_params.SamplingParams(temperature=given).temperature
        assert found == LOWEST_TEMPERATURE
    sampling_params.SamplingParams(temperature=HIGHEST_TEMPERATURE)
    refused = import_module("vllm.exceptions").VLLMValidationError
    with pytest.raises(refused, match="temperature must be in"):
        sampling_params.SamplingParams(temperature=HIGHEST_TEMPERATURE + 0.01)
