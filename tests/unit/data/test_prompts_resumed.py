"""Prompts that go on from a checkpoint: the same ones, or a refusal."""

import copy
import json

import pytest
from prompt_sources import TOKENIZER, source

from lora_moe_rl.config import DataConfig
from lora_moe_rl.data.prompts import PromptSource
from lora_moe_rl.errors import DataError


@pytest.mark.parametrize("drawn_before", [0, 5, 7, 23])
def test_resume_gives_the_same_next_prompts(write, generators, drawn_before):
    path = write(*({"prompt": str(i)} for i in range(7)))
    names = [f"{generators}:{name}" for name in ("counting", "three")]
    for config in ({"path": path}, {"generator": names[0]}, {"generator": names[1]}):
        unbroken = source(**config)
        unbroken.next(drawn_before)
        resumed = source(**config)
        resumed.load_state_dict(json.loads(json.dumps(unbroken.state_dict())))
        assert resumed.next(10) == unbroken.next(10)


def test_resume_with_other_data_is_refused(write):
    state = source(path=write({"prompt": "a"}, {"prompt": "b"})).state_dict()
    with pytest.raises(DataError, match=r"had 2 rows .* has 1"):
        source(path=write({"prompt": "a"})).load_state_dict(state)
    other = source(path=write({"prompt": "a"}, {"prompt": "b", "answer": "2"}))
    with pytest.raises(DataError, match=r"the rows of .*data.jsonl are not those .* logging.run_d"):
        other.load_state_dict(state)


def test_resume_with_another_seed_is_refused(write):
    path = write({"prompt": "a"}, {"prompt": "b"})
    with pytest.raises(DataError, match=r"seed was 3 .* and is now 4: restore it"):
        source(path=path, seed=4).load_state_dict(source(path=path).state_dict())


def test_resume_with_another_generator_is_refused(generators):
    state = source(generator=f"{generators}:three").state_dict()
    with pytest.raises(DataError, match=r"the rows of .*:other_three are not those"):
        source(generator=f"{generators}:other_three").load_state_dict(state)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"system_prompt": "T"}, r"data.system_prompt was 'S' .* and is now 'T': restore it"),
        ({"chat_template_kwargs": {"a": 2}}, r"data.chat_template_kwargs was .* and is now .*2"),
        ({"order": "sequential"}, r"data.order was 'shuffle' .* and is now 'sequential'"),
        ({"filter": {"n": [0, 2]}}, r"data.filter was {} .* and is now {'n': .0.0, 2.0.}"),
        ({"answer_key": "other"}, r"data.answer_key was 'answer' .* and is now 'other'"),
    ],
)
def test_resume_with_settings_that_make_other_prompts_is_refused(write, settings, named):
    path = write({"prompt": "a", "answer": "b", "other": "c", "n": 1})
    before = {"chat_template": True, "system_prompt": "S", "answer_key": "answer"}
    before["chat_template_kwargs"] = {"a": (1,)}

    def opened(**config):
        return PromptSource(DataConfig(path=path, **config), TOKENIZER, 3, 100)

    state = json.loads(json.dumps(opened(**before).state_dict()))
    opened(**before).load_state_dict(state)
    with pytest.raises(DataError, match=named):
        opened(**before | settings).load_state_dict(state)


def test_resume_with_another_chat_template_is_refused(write):
    config = DataConfig(path=write({"prompt": "a"}), chat_template=True)
    tokenizer = copy.deepcopy(TOKENIZER)
    state = json.loads(json.dumps(PromptSource(config, tokenizer, 3, 100).state_dict()))
    tokenizer.chat_template = "[{{ messages[0].content }}]"
    with pytest.raises(DataError, match=r"the chat template was .* and is now '\[{{ messages"):
        PromptSource(config, tokenizer, 3, 100).load_state_dict(state)
    del state["chat_template"]  # as an older checkpoint, which had no other than the model's
    PromptSource(config, tokenizer, 3, 100).load_state_dict(state)


def test_a_generator_that_is_never_the_same_may_go_on(generators):
    drawn = source(generator=f"{generators}:chance")
    drawn.next(5)
    source(generator=f"{generators}:chance").load_state_dict(drawn.state_dict())


def test_a_checkpoint_without_fingerprints_may_go_on(write):
    path = write({"prompt": "a"}, {"prompt": "b"})
    old = {"epoch": 1, "position": 1, "drawn": 3, "rows": 2}
    resumed = source(path=path)
    resumed.load_state_dict(old)
    assert [prompt.number for prompt in resumed.next(2)] == [3, 4]


def test_resume_with_other_arguments_is_refused(generators):
    state = source(generator=f"{generators}:sums", args={"level": 1}).state_dict()
    same_rows = source(generator=f"{generators}:sums", args={"level": 1, "most": 9})
    with pytest.raises(DataError, match=r"data.args was {'level': 1} .* and is now .*'most': 9"):
        same_rows.load_state_dict(state)
