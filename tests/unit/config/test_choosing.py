"""What is left of settings when an algorithm, a part of one or a plug-in is chosen over them."""

import pytest

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.files import to_yaml
from lora_moe_rl.config.overrides import override
from lora_moe_rl.config.recipes import load_config
from lora_moe_rl.errors import ConfigError
from tests.helpers.settings import changed

ALGORITHMS = ("dapo", "gspo", "dr_grpo", "rloo", "cispo", "vapo", "opd", "reinforce_pp", "sapo")


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("layered", [False, True])
def test_an_algorithm_chosen_over_a_saved_config_is_that_algorithm(name, layered, tmp_path):
    """A saved config holds every key: grpo's loss and clips are no choice of whom it was."""
    saved = tmp_path / "config.yaml"
    mine = ["algorithm.group_size=4", "trainer.lr=1e-4"]
    saved.write_text(to_yaml(changed("algorithm=grpo", *mine)))
    if layered:
        found = changed(f"@{saved}", f"algorithm={name}")
    else:
        found = override(load_config(str(saved)), [f"algorithm={name}"])
    assert found.model_dump() == changed(f"algorithm={name}", *mine).model_dump()


@pytest.mark.parametrize("part", ["loss=gspo", "advantage=rloo", "rejection=veto"])
def test_so_is_a_part(part, tmp_path):
    (tmp_path / "config.yaml").write_text(to_yaml(changed("algorithm=grpo")))
    found = override(load_config(str(tmp_path / "config.yaml")), [f"algorithm.{part}"])
    assert found.model_dump() == changed(f"algorithm.{part}").model_dump()


def test_what_stands_on_the_same_command_line_stays():
    both = ["algorithm.clip_high=0.2", "algorithm=dapo"]  # grpo's default, and chosen
    assert changed(*both).algorithm.clip_high == 0.2
    recipe = RunConfig.model_validate({"algorithm": {"name": "gspo", "clip_high": 0.5}})
    assert changed("algorithm=dapo", base=recipe).algorithm.clip_high == 0.5


NAMED = ("icepop", "mis", "decoupled_geo_rs_token_tis", "decoupled_k3_rs_token_tis",
         "bypass_ppo_clip", "bypass_pg_is")  # fmt: skip


@pytest.mark.parametrize("before", NAMED)
@pytest.mark.parametrize("after", ["none", "tis", "icepop", "sequence_mask", "decoupled_geo_rs"])
@pytest.mark.parametrize("saved", [False, True])
def test_a_correction_chosen_over_another_has_nothing_of_it(before, after, saved, tmp_path):
    base = changed(f"algorithm.correction={before}")
    assert base.algorithm.correction == before
    if saved:
        (tmp_path / "config.yaml").write_text(to_yaml(base))
        base = load_config(str(tmp_path / "config.yaml"))
    found = changed(f"algorithm.correction={after}", base=base)
    assert found.model_dump() == changed(f"algorithm.correction={after}").model_dump()


def test_a_named_correction_with_another_anchor_is_refused():
    both = ["algorithm.correction=bypass_ppo_clip", "algorithm.anchor=trainer"]
    with pytest.raises(ConfigError, match="stands for anchor=rollout too, and algorithm.anchor="):
        changed(*both)


@pytest.mark.parametrize(
    ("saved", "setting"),
    [
        (["tracker=wandb", "tracker.project=p"], "tracker=none"),
        (
            ["algorithm.correction=icepop", "algorithm.correction_max=7"],
            "algorithm.correction=none",
        ),
        (["algorithm.loss=gspo", "algorithm.clip_low=0.1"], "algorithm.loss=reinforce"),
        (
            ["environment=tools", "environment.tools=a.py:f", "environment.max_turns=9"],
            "environment=single_turn",
        ),
    ],
)
def test_settings_that_the_new_choice_has_not_go(saved, setting, tmp_path):
    base = changed(*saved)
    (tmp_path / "config.yaml").write_text(to_yaml(base))
    for one in (base, load_config(str(tmp_path / "config.yaml"))):
        assert changed(setting, base=one).model_dump() == changed(setting).model_dump()
    with pytest.raises(ConfigError, match="is no setting of|has no effect"):
        changed(*saved, setting)  # on one command line they contradict each other
