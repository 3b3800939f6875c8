"""How a conversation ended, whether its reward can be trusted then, and trying once more.

    done                a turn that calls nothing                       trusted
    max_turns           the last turn that is allowed calls something   trusted
    max_tokens          a turn was cut off                              trusted
    context_overflow    what was to be told did not fit                 trusted
    environment_error   what the policy talks to broke                  no reward
    timeout             what the policy talks to took too long          no reward

Of the first four the policy is the cause, so that their rewards are what they look like. Of the
last two it is not: such a conversation is begun anew, in a fresh environment, and when that fails
too often it has no reward, which leaves it out of the loss and of its group's mean. A call that
goes wrong (tool_error) and one that cannot be read (parse_error) end nothing: the policy is told.
Answers that hold special tokens (special_tokens) are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable

from lora_moe_rl.environments.parts.conversation import Conversation

TRUSTED = ("done", "max_turns", "max_tokens", "context_overflow")
UNTRUSTED = ("environment_error", "timeout")
FAULTS = ("tool_error", "parse_error", "special_tokens")
COUNTED = (*TRUSTED, *UNTRUSTED, *FAULTS, "turns", "tool_calls", "retried")


class Failed(Exception):
    """Raised when a conversation came to an end by which its reward cannot be trusted. `kind` is
    one of UNTRUSTED."""

    def __init__(self, kind: str, why: str):
        assert kind in UNTRUSTED
        super().__init__(why)
        self.kind = kind


def no_counts() -> Counter[str]:
    """Nothing of anything, so that every metric is there in every step."""
    return Counter(dict.fromkeys(COUNTED, 0))


async def tried(
    begin: Callable[[], Conversation],
    talk: Callable[[Conversation, Counter[str]], Awaitable[str]],
    retries: int,
    counts: Counter[str],
) -> Conversation:
    """A conversation that `begin` made and `talk` has led to one of the ends, of up to `retries`
    + 1; the last of them when all have failed, which then says why. `counts` gets the end and what
    `talk` counted, of the one that is returned alone, and `retried`, those that are not.

    All have the same seeds: the policy says the same again where it is told the same.
    """
    for left in range(retries, -1, -1):
        one, own = begin(), Counter[str]()
        try:
            end = await talk(one, own)
            assert end in TRUSTED, end
        except Failed as error:
            if left:
                counts["retried"] += 1
                continue
            end, one.failure = error.kind, str(error)
            if not one.turns:  # a group has as many samples as it should
                one.begin(one.prompt_ids)
                await one.ask(1)
        counts.update(own)
        counts[end] += 1
        counts["turns"] += one.turns
        return one
    raise AssertionError("it is tried at least once")
