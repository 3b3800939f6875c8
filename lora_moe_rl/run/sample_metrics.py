"""Metrics of a step's samples: tokens, ages, conversations. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from lora_moe_rl.data.samples import Group, Sample
from lora_moe_rl.run.mismatch import sampled_versions
from lora_moe_rl.telemetry import names


def rollout_metrics(samples: Sequence[Sample], seconds: float) -> dict[str, float]:
    """`seconds`: from the step's begin to its last sample, or to its end when engines sample all
    the time."""
    tokens = sum(sample.num_sampled for sample in samples)
    return {
        "rollout/tokens": tokens,
        names.TOKENS_PER_SECOND: tokens / seconds if seconds else math.nan,
        names.TRUNCATED: sum(sample.truncated for sample in samples) / len(samples),
        names.RESPONSE_LENGTH: sum(len(s.response_ids) for s in samples) / len(samples),
    }


def draft_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Of speculative decoding: how many of the guessed tokens were taken, and tokens that a forward
    sampled, over what engines told of. Nothing where nobody guessed."""
    told = [(one, one.drafts) for sample in samples for one in sample.segments]
    pairs = [(len(one.token_ids), drafts) for one, drafts in told if drafts is not None]
    if not pairs:
        return {}
    tokens = sum(length for length, _ in pairs)
    guessed, taken = (sum(drafts[i] for _, drafts in pairs) for i in (0, 1))
    return {
        "rollout/draft_acceptance": taken / guessed if guessed else math.nan,
        "rollout/tokens_per_forward": tokens / max(tokens - taken, 1),
    }


def environment_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """What an environment counted, over all conversations of the step; nothing of one that counts
    nothing."""
    totals: Counter[str] = Counter()
    for group in groups:
        totals.update(group.counts)
    conversations = sum(len(group.ends) for group in groups)
    found = {names.of_environment(name): float(value) for name, value in totals.items()}
    return found | ({names.of_environment("conversations"): float(conversations)} if found else {})


def data_metrics(samples: Sequence[Sample], seconds: float) -> dict[str, float]:
    """The metrics of rows' own answers: tokens of prompts and answers, and of answers alone, which
    are what is learned; `seconds`: from the step's begin to the end of its update."""
    tokens = sum(len(sample.token_ids) for sample in samples)
    answers = sum(len(sample.response_ids) for sample in samples)
    return {
        "data/tokens": tokens,
        names.DATA_TOKENS_PER_SECOND: tokens / seconds if seconds else math.nan,
        names.ANSWER_LENGTH: answers / len(samples),
    }


def age_metrics(samples: Sequence[Sample], version: int) -> dict[str, float]:
    """How many versions the step's tokens are older than the one that is updated."""
    ages = version - sampled_versions(samples)
    if not ages.size:
        return {}
    return {
        "rollout/age_oldest": int(ages.max()),
        "rollout/age_newest": int(ages.min()),
        "rollout/age_mean": float(ages.mean()),
    }


def continued_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Samples that more than one version sampled, versions a sample, and tokens that are fed again
    for parts of their own (schedule.continued=split), of those that are fed once."""
    spans = [len(np.unique(sampled_versions([sample]))) for sample in samples]
    again = sum(stop - 1 for sample in samples for stop in sample.splits)
    return {
        "rollout/continued": sum(span > 1 for span in spans),
        "rollout/spans_mean": float(np.mean(spans)),
        "rollout/spans_max": max(spans),
        "rollout/fed_again": again / sum(len(sample.token_ids) - 1 for sample in samples),
    }
