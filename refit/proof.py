"""The served proof: does the engine really serve the version it was sent?

The trainer and the engine score the same probe sequences, with the new adapter and without any.
Equal logprobs prove that the version is served, as far as the adapter changes the probe at all:
just after the start, when B is still zero, the adapter and the base are the same function, and no
probe can tell them apart. Reading the slots back, which the receiver does, covers that case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lora_moe_rl.errors import RefitError

PROBE_TOKENS = 256
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.15}


def probe_sequences(prompts: Sequence[list[int]], max_length: int) -> list[list[int]]:
    """Token ids of each prompt twice over, cut to PROBE_TOKENS and to what both engines take: vLLM
    samples one token more, and `max_length` (model.max_length) counts that too."""
    longest = min(PROBE_TOKENS, max_length - 1)
    return [(token_ids * 2)[:longest] for token_ids in prompts]


@dataclass(frozen=True)
class Proof:
    """Largest absolute logprob differences over the probe.

    max_diff: engine against trainer, both with the adapter.
    effect, trainer_effect: adapter against base, in the engine and in the trainer.
    applied: True when the engine's logprobs are nearer to the trainer's than to the base's; None
    when the adapter's effect is too small for this probe to tell.
    """

    version: int
    max_diff: float
    effect: float
    trainer_effect: float
    applied: bool | None


def default_tolerance(dtype: str) -> float:
    return TOLERANCES[dtype]


def check_served(
    engine: Sequence[np.ndarray],
    trainer: Sequence[np.ndarray],
    engine_base: Sequence[np.ndarray],
    trainer_base: Sequence[np.ndarray],
    tolerance: float,
    version: int,
) -> Proof:
    """Compares logprobs `[tokens - 1]` of each probe sequence.

    Raises RefitError when engine and trainer differ by more than `tolerance`, or when the engine's
    logprobs are those of the base though the trainer's are not.
    """
    ours, theirs, our_base, their_base = (
        _flat(name, arrays, version)
        for name, arrays in (
            ("engine", engine),
            ("trainer", trainer),
            ("engine_base", engine_base),
            ("trainer_base", trainer_base),
        )
    )
    max_diff = _largest(ours, theirs)
    effect, trainer_effect = _largest(ours, our_base), _largest(theirs, their_base)
    # What the two engines differ by without any adapter is what this probe cannot resolve.
    noise = max(_largest(our_base, their_base), np.finfo(np.float32).eps)
    applied: bool | None = None
    if trainer_effect > 10 * noise:
        to_trainer, to_base = np.abs(ours - theirs).mean(), np.abs(ours - our_base).mean()
        applied = bool(to_trainer < to_base)
    proof = Proof(version, max_diff, effect, trainer_effect, applied)
    if applied is False:
        raise RefitError(
            f"the engine serves the base instead of adapter version {version}: its logprobs differ "
            f"from the base's by {effect:.2e}, the trainer's by {trainer_effect:.2e}"
        )
    if max_diff > tolerance:
        raise RefitError(
            f"adapter version {version}: engine and trainer differ by {max_diff:.2e} in logprob on "
            f"the probe, more than {tolerance:.2e}; without the adapter they differ by "
            f"{_largest(our_base, their_base):.2e} (refit.proof_tolerance sets the limit)"
        )
    return proof


def _flat(name: str, arrays: Sequence[np.ndarray], version: int) -> np.ndarray:
    flat = np.concatenate([np.asarray(array, dtype=np.float64) for array in arrays])
    if not np.isfinite(flat).all():
        raise RefitError(f"adapter version {version}: {name} logprobs hold NaN or infinite values")
    return flat


def _largest(a: np.ndarray, b: np.ndarray) -> float:
    if a.shape != b.shape:
        raise RefitError(f"probe of {a.size} tokens against one of {b.size}")
    return float(np.abs(a - b).max())
