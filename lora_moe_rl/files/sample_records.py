"""What samples.jsonl and tokens.jsonl keep of a sample."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from lora_moe_rl.algorithms.base import Signal
from lora_moe_rl.data.samples import NOT_SAMPLED, Group, Sample
from lora_moe_rl.data.scores import Details
from lora_moe_rl.data.update_result import TokenValues


def sample_record(step: int, group: Group, signal: Signal | None, index: int) -> dict[str, Any]:
    """A line of samples.jsonl; without a signal the sample has no advantage."""
    sample = group.samples[index]
    advantages = signal.advantages[index][sample.mask] if signal is not None else np.zeros(0)
    sampled = sample.versions[sample.mask]
    return {
        "step": step,
        "drawn": group.prompt.number,
        **({} if group.prompt.data_row is None else {"row": group.prompt.data_row}),
        **({"data_set": group.prompt.data_set} if group.prompt.data_set else {}),
        "prompt": group.asked(index),
        "response": sample.text,
        "reward": float(group.rewards[index]),
        **({} if group.baseline is None else {"baseline": group.baseline}),
        **_reward_details(group.details, index),
        **({} if group.teacher_read is None else {"teacher_read": group.teacher_read[index]}),
        "advantage": _one_number(advantages),
        **(
            {} if signal is None or signal.copies is None else {"copies": int(signal.copies[index])}
        ),
        **({"turn_states": list(sample.states)} if sample.states else {}),
        "finish_reason": sample.finish_reason,
        "tokens": len(sample.response_ids),
        **(_turns(sample) if sample.messages else {}),
        "versions": sorted({int(version) for version in sampled[sampled != NOT_SAMPLED]}),
    }


def token_record(
    group: Group, signal: Signal | None, index: int, known: TokenValues | None
) -> dict[str, Any]:
    """The record of every token after the prompt; without a signal no advantages and weights, and
    of the trainer what is known. `differences`: the trainer's logprob minus the engine's, too small
    for six figures of both to show it, where an engine has sampled any token."""
    sample = group.samples[index]
    found = {"ids": sample.response_ids, "versions": sample.versions, "logprobs": sample.logprobs}
    if signal is not None:
        found |= {"advantages": signal.advantages[index], "weights": signal.weights[index]}
    if known is not None:
        found |= {"trainer_logprobs": known.logprobs, "entropy": known.entropy}
        if sample.num_sampled:
            apart = known.logprobs.astype(np.float64) - sample.logprobs
            found["differences"] = np.where(sample.versions != NOT_SAMPLED, apart, 0.0)
    return {name: _rounded(values) for name, values in found.items()}


def routes_record(group: Group, index: int) -> dict[str, Any]:
    """The experts that the engine sent each token after the prompt to, as it was fed: of each token
    those of each MoE layer of `layers`, None for one without a record, as the last token, which is
    not fed. Nothing of a sample that is trained in parts: its tokens are fed several times."""
    sample = group.samples[index]
    if group.routes is None or sample.splits:
        return {}
    table = group.routes.of_sample(index)
    fed = range(len(sample.prompt_ids), len(sample.token_ids))
    rows = [_experts(table, row) if row < len(table.ids) else None for row in fed]
    return {"layers": list(table.layers), "experts": rows}


def _experts(table: Any, row: int) -> list[list[int] | None] | None:
    """The experts of a row in each layer; None when no layer has any."""
    if not table.valid[row].any():
        return None
    pairs = zip(table.ids[row].tolist(), table.valid[row].tolist(), strict=True)
    return [ids if valid else None for ids, valid in pairs]


def _rounded(values: np.ndarray) -> list[int] | list[float]:
    """Numbers as a file keeps them: those that are not whole with six figures."""
    if values.dtype.kind == "i":
        return values.tolist()
    return [float(f"{value:.6g}") for value in values.tolist()]


def _reward_details(details: Details, index: int) -> dict[str, Any]:
    """What several functions gave a sample, what they have logged, why it failed; as far as there
    is any."""
    found: dict[str, Any] = {
        "rewards": {name: float(one.rewards[index]) for name, one in details.by_function.items()},
        "extra": {column: values[index] for column, values in details.extra.items()},
        "failure": details.reasons.get(index),
        "turn_rewards": details.by_turn.get(index),
    }
    return {key: value for key, value in found.items() if value}


def _turns(sample: Sample) -> dict[str, Any]:
    """The turns of a sample of several: its segments after the prompt, and what was said in
    them."""
    parts = [{"author": one.author, "tokens": len(one.token_ids)} for one in sample.segments[1:]]
    return {"segments": parts, "messages": sample.messages}


def _one_number(values: np.ndarray) -> float:
    """The value that all have, or else their mean; NaN when there are none."""
    if not len(values):
        return math.nan
    return float(values[0] if (values == values[0]).all() else values.mean())
