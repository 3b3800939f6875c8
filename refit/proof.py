"""The served proof: does the engine really serve the version it was sent?

Engine and trainer score the same tokens, the trainer with the routes that this engine took. The
version is served when

    near       their logprobs differ by no more than a tolerance (times their size, above 1), on a
               probe that stays the same for the whole run, and on pieces of the step's own samples:
               other ones each step, so that in time every expert is reached. In bfloat16 a token
               now and then is further off by rounding alone: there it is the root mean square of
               the others that must be near, and a token beyond leaves it untold;
    not old    on the probe that stays, the engine is nearer to this version than to the base, and
               than to the versions served before it: what the trainer gave for those was kept.

On the pieces of samples there is no second: the trainer cannot score them under a version that it
has left behind. And nothing can be told apart where the trainer's own logprobs of two versions are
equal, or nearer to each other than engine and trainer are: at the start, when B is still zero, or
after a tiny step in bfloat16. The proof then says that it cannot tell, and whoever asked for it has
the engines compare what they hold with what they were sent (`run/publisher.py`, `differing` of the
engines), as also at the start, when an engine comes back, and every refit.compare_every versions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lora_moe_rl.errors import RefitError

PROBE_TOKENS = 256
MEAN, LEFT_OUT = 1 / 3, 1 / 16  # where rounds: of the tolerance, without so many of the worst
Scores = Sequence[np.ndarray]  # logprobs [tokens - 1] of each sequence


@dataclass(frozen=True)
class Tolerance:
    """`token`: by how much a token's logprob may be off, times its size above 1. `rounds`: whether
    rounding alone may put single tokens beyond that; then the root mean square of the others may be
    MEAN of it."""

    token: float
    rounds: bool = False


TOLERANCES = {"float32": Tolerance(1e-4), "bfloat16": Tolerance(0.15, rounds=True)}


def probe_sequences(prompts: Sequence[list[int]], max_length: int) -> list[list[int]]:
    """Token ids of each prompt twice over, cut to PROBE_TOKENS and to what both engines take: vLLM
    samples one token more, and `max_length` (model.max_length) counts that too."""
    longest = min(PROBE_TOKENS, max_length - 1)
    return [(token_ids * 2)[:longest] for token_ids in prompts]


def pieces(
    lengths: Sequence[int], count: int, max_length: int, seed: Sequence[int]
) -> list[tuple[int, slice]]:
    """A piece of each of `count` of the sequences (of all, if they are fewer), as long as a probe
    may be: (the sequence's number, its tokens). Which, and where it begins, depends on `seed`
    alone."""
    longest = min(PROBE_TOKENS, max_length - 1)
    draw = np.random.default_rng(seed)
    scorable = [number for number, length in enumerate(lengths) if length > 1]
    found = []
    for place in draw.permutation(len(scorable))[:count]:
        number = scorable[place]
        start = int(draw.integers(0, max(0, lengths[number] - longest) + 1))
        found.append((number, slice(start, start + longest)))
    return found


@dataclass(frozen=True)
class Proof:
    """max_diff: the largest |logprob difference| between engine and trainer, both with the adapter.
    told: whether the version could be told from the base and from every older version, and was, and
    no token was beyond the tolerance.
    """

    max_diff: float
    told: bool


def tolerance_of(dtype: str, eight_bits: bool = False, token: float | None = None) -> Tolerance:
    """`eight_bits`: whether both quantise activations to e4m3, where the last bit of a float32 is a
    step of a sixteenth now and then. `token`: refit.proof_tolerance."""
    found = TOLERANCES["bfloat16" if eight_bits else dtype]
    return found if token is None else replace(found, token=token)


def check_served(
    engine: Scores,
    trainer: Scores,
    engine_base: Scores,
    trainer_base: Scores,
    tolerance: Tolerance,
    version: int,
    older: Mapping[int, Scores] | None = None,
) -> Proof:
    """Compares the scores of the probe. `older`: the trainer's, by version, of versions that an
    engine might still serve.

    Raises RefitError when the engine is nearer to the base or to an older version than to this one
    though they can be told apart, or when engine and trainer differ by more than `tolerance`.
    """
    ours, theirs = _flat("engine", engine, version), _flat("trainer", trainer, version)
    our_base = _flat("engine_base", engine_base, version)
    their_base = _flat("trainer_base", trainer_base, version)
    others = {"the base": their_base} | {
        f"version {number}": _flat("older trainer", scores, number)
        for number, scores in (older or {}).items()
    }
    for array in (theirs, our_base, *others.values()):
        _check_shape(ours, array)
    base_diff = our_base - their_base
    nearer = {name: _nearer(ours, theirs, other, base_diff) for name, other in others.items()}
    wrong = [name for name, found in nearer.items() if found is False]
    if wrong:
        name = min(wrong, key=lambda name: np.linalg.norm(ours - others[name]))
        raise RefitError(
            f"the engine serves {name} instead of adapter version {version}: on the probe its "
            f"logprobs differ from the trainer's by {_largest(ours, others[name]):.2e} for {name}, "
            f"by {_largest(ours, theirs):.2e} for version {version}"
        )
    without = f"; without the adapter they differ by {np.abs(base_diff).max():.2e}"
    max_diff, near = _check_near(ours, theirs, tolerance, version, "the probe", without)
    return Proof(max_diff, told=near and None not in nearer.values())


def check_pieces(
    engine: Scores, trainer: Scores, tolerance: Tolerance, version: int
) -> tuple[float, bool]:
    """(the largest |logprob difference| on pieces of samples, 0 without any; whether all are within
    the tolerance). Raises RefitError when they are further apart than rounding explains."""
    if not len(engine):
        return 0.0, True
    ours, theirs = _flat("engine", engine, version), _flat("trainer", trainer, version)
    return _check_near(ours, theirs, tolerance, version, "the step's samples")


def _check_near(
    ours: np.ndarray,
    theirs: np.ndarray,
    tolerance: Tolerance,
    version: int,
    where: str,
    more: str = "",
) -> tuple[float, bool]:
    """The largest difference, and whether every token is within the tolerance. A logprob far below
    -1, as of a token that a user or a tool wrote, is the difference of two large numbers: its
    rounding grows with it, and so does what may be."""
    _check_shape(ours, theirs)
    diffs = np.abs(ours - theirs)
    off = diffs / np.maximum(1.0, np.abs(theirs))
    worst = int(off.argmax())
    judged, limit, by = off[worst], tolerance.token, f"{diffs[worst]:.2e}"
    if tolerance.rounds:
        judged, limit = _rms(np.sort(off)[: -math.ceil(LEFT_OUT * len(off))]), MEAN * limit
        by = f"{judged:.2e} times its size in root mean square, and {by} at most,"
    if judged > limit:
        raise RefitError(
            f"adapter version {version}: engine and trainer differ by {by} in logprob on {where} "
            f"({ours[worst]:.6g}, {theirs[worst]:.6g}), more than {limit:.2e} times its size{more} "
            "(refit.proof_tolerance sets the limit)"
        )
    return float(diffs.max()), bool(off[worst] <= tolerance.token)


def _nearer(
    ours: np.ndarray, theirs: np.ndarray, other: np.ndarray, base_diff: np.ndarray
) -> bool | None:
    """Whether the engine is nearer to the trainer's version than to its other one, by the sum of
    squares; None when the two are too near each other for this noise.

    Noise is what engine and trainer differ by without adapters, and at the nearer of the two. Noise
    of s a token moves the engine by s along the line from one version to the other, and halfway is
    where the answer turns: at 10 s apart it would take noise of 5 s. One token's own noise may be
    far above s, and moves it by no more than itself; an engine that is halfway says nothing either:
    hence four times the largest.
    """
    here, there = np.linalg.norm(ours - theirs), np.linalg.norm(ours - other)
    noise = (base_diff, ours - (theirs if here < there else other))
    resolved = max(max(10 * _rms(values), 4 * np.abs(values).max()) for values in noise)
    apart = np.linalg.norm(theirs - other)
    if apart <= max(resolved, 10 * np.finfo(np.float32).eps):
        return None
    return bool(here < there)


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2))) if values.size else 0.0


def _flat(name: str, arrays: Scores, version: int) -> np.ndarray:
    flat = np.concatenate([np.asarray(array, dtype=np.float64) for array in arrays])
    if not np.isfinite(flat).all():
        raise RefitError(f"adapter version {version}: {name} logprobs hold NaN or infinite values")
    return flat


def _largest(a: np.ndarray, b: np.ndarray) -> float:
    _check_shape(a, b)
    return float(np.abs(a - b).max())


def _check_shape(a: np.ndarray, b: np.ndarray) -> None:
    if a.shape != b.shape:
        raise RefitError(f"probe of {a.size} tokens against one of {b.size}")
