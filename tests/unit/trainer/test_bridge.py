"""Megatron-Bridge is imported without models that nobody asks for, and has them all the same."""

import subprocess
import sys
import textwrap

import pytest

PROGRAM = textwrap.dedent(
    """
    import sys
    from lora_moe_rl.adapters.families import FAMILIES
    from lora_moe_rl.trainer.environment import without_trackers
    from lora_moe_rl.trainer import bridge, megatron_on_cpu

    without_trackers()
    megatron_on_cpu.install()
    assert bridge.load() is bridge.load()
    imported = {name.split(".")[3] for name in sys.modules if name.count(".") == 3
                and name.startswith("megatron.bridge.models.")}
    assert {"conversion", "qwen", "deepseek", "glm"} <= imported, imported
    assert not {"gemma", "llama", "qwen_vl"} & imported, imported
    assert not [one for one in sys.meta_path if type(one).__name__ == "_WhenAsked"]

    from megatron.bridge.models import Gemma2ModelProvider
    from megatron.bridge.models.gemma.gemma2_provider import Gemma2ModelProvider as own
    from megatron.bridge.models.conversion.model_bridge import get_model_bridge
    import megatron.bridge.models
    import megatron.bridge.diffusion.models
    import transformers

    for architecture, family in FAMILIES.items():
        if family.inside is not None:  # the language model in it has the bridge
            architecture = family.inside.architecture
        one = get_model_bridge(getattr(transformers, architecture, architecture))
        assert type(one).__module__.startswith("lora_moe_rl.adapters.families."), one
    assert Gemma2ModelProvider is own
    assert set(megatron.bridge.models.__all__) <= set(dir(megatron.bridge.models))
    assert megatron.bridge.diffusion.models.NemotronLabsDiffusionBridge

    # What is asked for after the stub of that name has been put in its place: as before.
    from lora_moe_rl.config.trainer import TrainerConfig, has_transformer_engine

    installed = getattr(sys.modules["transformer_engine"], "__spec__", None) is not None
    assert has_transformer_engine() is installed
    assert TrainerConfig(device="cuda").shares_prompts is not installed
    try:
        megatron.bridge.models.NoSuchModel
    except AttributeError:
        print("all")
    """
)


@pytest.mark.slow
def test_models_are_imported_when_they_are_asked_for():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout.strip().endswith("all"), done.stderr
