"""Several data sets: in their ratios, each with its own settings, resumed where they stood."""

import json

import numpy as np
import pytest

from lora_moe_rl.config import DataConfig, SetConfig
from lora_moe_rl.data.mixture import open_prompts
from lora_moe_rl.data.prompts import PromptSource
from lora_moe_rl.errors import ConfigError, DataError
from lora_moe_rl.tiny.tokenizer import make_tokenizer

TOKENIZER = make_tokenizer()
MAX_TOKENS = 24


@pytest.fixture
def sets(tmp_path):
    """Settings of sets by name: `math` has the rows m0 to m6, `code` c0 to c4."""
    for name, count in (("math", 7), ("code", 5)):
        rows = [{"prompt": f"{name[0]}{i}", "answer": name} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "counting.py").write_text(
        "def rows(seed):\n    for i in range(10 ** 9):\n        yield {'prompt': f'{seed}:{i}'}\n"
    )
    return {
        "math": {"path": str(tmp_path / "math.jsonl"), "ratio": 3},
        "code": {"path": str(tmp_path / "code.jsonl")},
        "count": {"generator": f"{tmp_path}/counting.py:rows", "ratio": 2},
    }


def mixture(seed=3, **sets):
    return open_prompts(DataConfig(sets=sets), TOKENIZER, seed, MAX_TOKENS, {})


def drawn_of(prompts):
    return [prompt.data_set for prompt in prompts]


def test_sets_are_drawn_from_in_their_ratios(sets):
    del sets["count"]
    prompts = mixture(**sets).next(16)
    one_step = ["math", "code", "math", "math"]
    assert drawn_of(prompts) == one_step * 4
    assert [prompt.number for prompt in prompts] == list(range(16))
    assert all(prompt.text[1:] == str(prompt.data_row) for prompt in prompts)
    assert all(prompt.text[0] == prompt.data_set[0] for prompt in prompts)


@pytest.mark.parametrize("seed", range(5))
def test_no_count_is_ever_far_from_its_ratio(sets, seed):
    ratios = np.random.default_rng(seed).uniform(0.1, 5, size=4)
    settings = {f"set{i}": {**sets["count"], "ratio": ratio} for i, ratio in enumerate(ratios)}
    drawn = np.array([int(name[3:]) for name in drawn_of(mixture(**settings).next(400))])
    given = np.cumsum(drawn[:, None] == np.arange(4), axis=0)
    wanted = np.arange(1, 401)[:, None] * ratios / ratios.sum()
    assert np.abs(given - wanted).max() < 1.5


def test_the_rows_of_a_set_come_as_if_it_were_the_only_one(sets):
    prompts = mixture(**sets).next(60)
    for name, settings in sets.items():
        own = [prompt for prompt in prompts if prompt.data_set == name]
        alone = {key: value for key, value in settings.items() if key != "ratio"}
        source = PromptSource(DataConfig(**alone), TOKENIZER, 3, MAX_TOKENS)
        assert [p.text for p in own] == [p.text for p in source.next(len(own))]
        assert len(own) >= 10


def test_a_set_with_fewer_rows_than_its_share_of_a_step_is_told_of(sets):
    assert mixture(**sets).repeated(14) == []  # 7 of math's 7 rows, 2.3 of code's 5
    (told,) = mixture(**sets).repeated(16)
    assert told.startswith("data.sets.math.path=") and "7 prompts, and a step takes 8" in told
    both = mixture(**sets).repeated(36)
    assert ["data.sets.math" in told for told in both] == [True, False] and len(both) == 2


def test_the_order_in_which_sets_are_named_does_not_matter(sets):
    other_way = dict(reversed(sets.items()))
    assert mixture(**sets).next(30) == mixture(**other_way).next(30)


def test_one_data_set_is_as_it_was(sets):
    config = DataConfig(path=sets["math"]["path"])
    one = open_prompts(config, TOKENIZER, 3, MAX_TOKENS, {})
    assert one.next(9) == PromptSource(config, TOKENIZER, 3, MAX_TOKENS).next(9)
    assert {prompt.data_set for prompt in one.next(3)} == {""}


@pytest.mark.parametrize("drawn_before", [0, 1, 5, 29])
def test_resume_gives_the_same_next_prompts(sets, drawn_before):
    unbroken = mixture(**sets)
    unbroken.next(drawn_before)
    resumed = mixture(**sets)
    resumed.load_state_dict(json.loads(json.dumps(unbroken.state_dict())))
    assert resumed.next(20) == unbroken.next(20)


def test_a_look_at_every_set_takes_no_prompt(sets):
    looked_at, left_alone = mixture(**sets), mixture(**sets)
    assert drawn_of(looked_at.examples(1)) == ["math", "code", "count"]
    assert looked_at.lengths()[:13] == [2] * 12 + [3]
    assert looked_at.next(20) == left_alone.next(20)


def change_row(sets):
    with open(sets["code"]["path"]) as file:
        text = file.read()
    with open(sets["code"]["path"], "w") as file:
        file.write(text.replace("c3", "c9"))


def change(name, key, value):
    return lambda sets: sets[name].update({key: value})


@pytest.mark.parametrize(
    ("different", "reason"),
    [
        (change_row, r"the rows of .*code.jsonl are not those of when"),
        (change("code", "limit", 4), r"had 5 rows .*code.jsonl has 4"),
        (change("code", "ratio", 2), r"code .ratio 1.0., count .*and is now code .ratio 2.0., cou"),
        (lambda sets: sets.pop("code"), r"data.sets was code .* and is now count .*: restore it"),
        (change("math", "order", "sequential"), r"data.sets.math.order was 'shuffle' .* now 'seq"),
    ],
)
def test_resume_with_other_sets_is_refused(sets, different, reason):
    state = mixture(**sets).state_dict()
    different(sets)
    with pytest.raises(DataError, match=reason):
        mixture(**sets).load_state_dict(state)


def test_resume_of_one_set_as_several_or_of_several_as_one_is_refused(sets):
    one = PromptSource(DataConfig(path=sets["math"]["path"]), TOKENIZER, 3, MAX_TOKENS)
    several = mixture(**sets)
    with pytest.raises(DataError, match=r"data.sets was empty when .* and is now code"):
        several.load_state_dict(one.state_dict())
    with pytest.raises(DataError, match=r"several data sets .*data.sets=math, code, count.* only"):
        one.load_state_dict(several.state_dict())


def test_errors_name_the_key_of_the_set(sets, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "two.jsonl").write_text('{"prompt": "a", "question": "b"}\n')
    for settings, reason in [
        ({"path": str(tmp_path / "empty.jsonl")}, "data.sets.bad.path=.*empty.jsonl has no rows"),
        ({"path": str(tmp_path / "two.jsonl")}, "with data.sets.bad.prompt_key=prompt"),
        ({"path": sets["math"]["path"], "system_prompt": "S"}, "data.sets.bad.chat_template=true"),
    ]:
        with pytest.raises(DataError, match=reason):
            mixture(math=sets["math"], bad=settings)
    with pytest.raises(ConfigError, match=r"set data.sets.bad.path or data.sets.bad.generator$"):
        mixture(math=sets["math"], bad={})


def test_the_same_settings_may_be_two_sets(sets):
    common = SetConfig(**sets["math"])
    with pytest.raises(DataError, match=r"data.sets.b.path=gone.jsonl: there is no such file"):
        mixture(a=common, b=common.model_copy(update={"path": "gone.jsonl"}))
    assert drawn_of(mixture(a=common, b=common).next(4)) == ["a", "b"] * 2
