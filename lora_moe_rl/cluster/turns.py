"""Whose turn it is on devices that trainer and engines share, and what may be done in it.

    phase     on the devices, beside both bases    may be done            leads on
    start     slots, cache                         score, write           go on -> rollout
    rollout   slots, cache                         sample, score          pause -> paused
    paused    slots, cache; no request             -                      give back -> train
    train     activations                          -                      free -> freed
    freed     (slots)                              -                      wake slots -> refit
    refit     slots                                write                  wake cache -> proof
    proof     slots, cache, which is empty         score                  go on -> rollout

The base and the slots of engines are away, too, from train to freed where they give those back.
Cache and activations are never there at once, but for the few sequences of a proof; what is away is
neither read nor written; nothing is sampled under a version that is not proven.
"""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    START = "start"
    ROLLOUT = "rollout"
    PAUSED = "paused"
    TRAIN = "train"
    FREED = "freed"
    REFIT = "refit"
    PROOF = "proof"


class Act(StrEnum):
    SAMPLE = "sample"
    SCORE = "score"
    WRITE = "write"
    PAUSE = "pause"
    GIVE_BACK = "give back"
    FREE = "free"
    WAKE_SLOTS = "wake slots"
    WAKE_CACHE = "wake cache"
    GO_ON = "go on"


LEADS_TO: dict[tuple[Phase, Act], Phase] = {
    (Phase.START, Act.SCORE): Phase.START,
    (Phase.START, Act.WRITE): Phase.START,
    (Phase.START, Act.GO_ON): Phase.ROLLOUT,
    (Phase.ROLLOUT, Act.SAMPLE): Phase.ROLLOUT,
    (Phase.ROLLOUT, Act.SCORE): Phase.ROLLOUT,
    (Phase.ROLLOUT, Act.PAUSE): Phase.PAUSED,
    (Phase.PAUSED, Act.GIVE_BACK): Phase.TRAIN,
    (Phase.TRAIN, Act.FREE): Phase.FREED,
    (Phase.FREED, Act.WAKE_SLOTS): Phase.REFIT,
    (Phase.REFIT, Act.WRITE): Phase.REFIT,
    (Phase.REFIT, Act.WAKE_CACHE): Phase.PROOF,
    (Phase.PROOF, Act.SCORE): Phase.PROOF,
    (Phase.PROOF, Act.GO_ON): Phase.ROLLOUT,
}


class OutOfTurn(RuntimeError):
    """Something was about to be done in a phase that has no place for it: an error of ours."""


def after(phase: Phase, act: Act) -> Phase:
    """The phase after an act. Raises OutOfTurn for one that has no place in it."""
    if (phase, act) not in LEADS_TO:
        places = " or ".join(where for where, what in LEADS_TO if what is act)
        raise OutOfTurn(f"'{act}' has no place in the phase '{phase}', only in {places}")
    return LEADS_TO[phase, act]
