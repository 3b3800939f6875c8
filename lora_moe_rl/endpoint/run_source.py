"""Who samples for a trajectory of a run: the policy as it is trained, and beside it the frozen base
and adapter versions that still have a slot, as a judge or a simulated user. What these say is in no
sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.samples import Sample
from lora_moe_rl.endpoint.bodies import BASE, POLICY, Asked, version_in
from lora_moe_rl.endpoint.refusal import Refused, bad_request
from lora_moe_rl.errors import LoraMoeRlError, NotServed
from lora_moe_rl.ports import Answers, Policy, Ref, Turn


class RunSource:
    """Of one trajectory. `overrule`: what is asked of the policy otherwise than it is trained is
    answered all the same."""

    def __init__(self, config: RunConfig, overrule: bool, policy: Policy, tokenizer: Any):
        self._policy, self._overrule = policy, overrule
        self.max_length = config.model.max_length
        self.max_response = config.rollout.max_response_tokens
        self.temperature = config.rollout.temperature
        self.stops = {tokenizer.eos_token_id, *config.rollout.stop_token_ids}
        self.has_base = config.refit.mode != "merged"
        self.overruled = self.base_requests = 0
        self.on_failure: Any = None

    def models(self) -> list[str]:
        return [POLICY, BASE] if self.has_base else [POLICY]

    def failed(self, error: LoraMoeRlError) -> None:
        self.on_failure(error)

    def held_up(self) -> float:
        return self._policy.held_up()

    def policy(self, asked: Asked) -> tuple[str, Answers]:
        version = version_in(asked.model)
        if self.has_base and (asked.model == BASE or version is not None):
            beside = self._policy.beside(version, asked.sampling.manner)
            return asked.model, _Beside(self, beside, asked.model)
        if wrong := self._differing(asked):
            if not self._overrule:
                told = f"{wrong}; ask so, or set environment.overrule=true"
                if asked.model != POLICY:
                    raise Refused(404, "model_not_found", told)
                raise bad_request(told)
            self.overruled += 1
        return POLICY, self._policy

    def _differing(self, asked: Asked) -> str | None:
        """What is asked for that is not how the policy is trained."""
        how = asked.sampling
        if asked.model != POLICY:
            return f"model={asked.model}, and a trajectory is sampled by model={POLICY}"
        if how.temperature not in (None, self.temperature):
            return f"temperature={how.temperature}, and rollout.temperature={self.temperature:g}"
        for name, all_of_it in (("top_p", (None, 1)), ("top_k", (None, 0, -1)), ("seed", (None,))):
            if (value := getattr(how, name)) not in all_of_it:
                return f"{name}={value}, and the run samples without it"
        if more := sorted(set(how.stop_token_ids or ()) - self.stops):
            return f"stop_token_ids={more}, and rollout.stop_token_ids does not have them"
        return None


class _Beside:
    """A model beside the policy. Raises Refused for a version that is gone."""

    def __init__(self, source: RunSource, answers: Answers, model: str):
        self.source, self.answers, self.model = source, answers, model

    async def sample(
        self, token_ids: Sequence[int], n: int, turn: Turn | None = None
    ) -> tuple[list[Sample], Ref]:
        try:
            answer = await self.answers.sample(token_ids, n, turn)
        except NotServed as error:
            there = ", ".join([POLICY, *(f"{POLICY}@{one}" for one in error.served), BASE])
            told = f"there is no model {self.model} here any more; there are {there}"
            raise Refused(404, "model_not_found", told) from error
        self.source.base_requests += 1
        return answer
