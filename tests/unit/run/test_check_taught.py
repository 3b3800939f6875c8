"""`lora-moe-rl check` of runs with a teacher: a server's, or the policy itself."""

import pytest

from lora_moe_rl.tiny.tokenizer import make_tokenizer
from tests.helpers.teacher_server import MODEL, teacher_server

pytestmark = pytest.mark.seconds


def test_distillation_needs_a_teacher_and_no_reward(check):
    tokenizer = make_tokenizer()
    distil = ("algorithm=opd", "reward.function=null", "algorithm.teacher_retries=0")
    with teacher_server(decode=lambda i: tokenizer.decode([i])) as server:
        named = (f"algorithm.teacher_url={server.url}", f"algorithm.teacher_model={MODEL}")
        code, found, _ = check(*distil, *named)
        assert code == 0 and {state for state, _ in found.values()} == {"ok"}
        assert found["reward"][1] == "none, which algorithm=opd does without"
        assert found["teacher"][1].startswith(f"{MODEL} at {server.url}, takes 4,096 tokens; ")
        server.decode = lambda i: tokenizer.decode([i ^ 1])
        code, found, _ = check(*distil, *named)
        assert code == 2 and "another vocabulary" in found["teacher"][1]
        code, found, _ = check(*distil, *named, "algorithm.reward_weight=0.5")
        assert code == 2 and "reward.function is not set" in found["reward"][1]
    code, found, _ = check(*distil, *named)
    assert code == 2 and "Connection error" in found["teacher"][1]
    code, found, _ = check(*distil)
    assert code == 2 and "algorithm.teacher_url is not set" in found["reward"][1]


def test_a_policy_that_teaches_itself_needs_something_to_read_and_room_for_it(check):
    code, found, _ = check("algorithm=sdpo", "algorithm.feedback_key=answer")
    assert code == 0 and found["teacher"] == (
        "ok",
        "the policy itself, with the adapter that is served; reads samples with a reward of 1 or "
        "more; reads the column answer of the rows",
    )
    hints = ("algorithm=sdpo", "algorithm.success_reward=null", "algorithm.feedback_key=hints")
    code, found, _ = check(*hints, "algorithm.teacher_weights=base", "reward.function=null")
    assert code == 0 and found["reward"][1] == "none, which algorithm=sdpo does without"
    assert found["teacher"][1].endswith("the bare base; reads the column hints that is logged")
    code, found, _ = check("algorithm=sdpo", "reward.function=null")
    assert code == 2 and "reward.function is not set" in found["reward"][1]


def test_a_policy_that_has_no_room_to_read_is_warned_of(check):
    """45 tokens are the first prompt's 4, one of a solution, and two responses of 20; an engine
    samples one more."""
    plain = ("{prompt}{solution}{feedback}", "{successful_previous_attempt}")
    templates = [
        f"algorithm.{key}_template={one}"
        for key, one in zip(("reprompt", "solution"), plain, strict=True)
    ]
    asked = ("algorithm=sdpo", *templates, "rollout.max_response_tokens=20")
    code, found, _ = check(*asked, "model.max_length=45")
    state, text = found["teacher"]
    assert code == 0 and state == "warning" and "leaves about 40 for both" in text
    _, found, _ = check(*asked, "model.max_length=46")
    assert found["teacher"][0] == "ok"


def test_a_policy_cannot_teach_itself_where_others_write_its_prompts(check):
    agents = ("environment=external", "environment.command=true")
    code, found, _ = check("algorithm=sdpo", *agents)
    assert code == 2 and "environment=external begin with other messages" in found["teacher"][1]


def test_a_policy_cannot_tell_more_of_its_likeliest_tokens_than_its_engines(check):
    asked = ("algorithm=sdpo", "algorithm.loss=distill")
    more = "algorithm.teacher_top_k=30"
    assert check(*asked)[0] == 0
    code, found, _ = check(*asked, more)
    assert code == 2 and "set rollout.engine_args.max_logprobs=30" in found["teacher"][1]
    for most in (30, -1):  # all there are
        assert check(*asked, more, f"rollout.engine_args.max_logprobs={most}")[0] == 0
