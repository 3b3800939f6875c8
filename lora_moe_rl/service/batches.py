"""Data of a client as what the trainer takes: each datum one sample, all of whose tokens count.

tokens    t0  t1  t2          fed
targets   y0  y1  y2          whose logprobs are wanted; most often t1 t2 t3
sample    t0 │ t1  t2  y2     a prompt of one token, and a response of as many as are fed
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.errors import ServiceError
from lora_moe_rl.service.backend import Datum, Facts, LossCall
from lora_moe_rl.trainer import service_losses
from lora_moe_rl.trainer.service_losses import LOGPROBS, MARKS

ROUNDING = 1e-3  # how far above 0 the logprob of a sure token may come out


def check_data(data: Sequence[Datum], call: LossCall, facts: Facts, vocab_size: int) -> None:
    """Raises ServiceError for what cannot be trained on, naming the datum."""
    loss, _ = service_losses.find(call.name, call.settings)
    if not data:
        raise ServiceError("there is no datum to learn from")
    for number, datum in enumerate(data):
        if wrong := _wrong(datum, call.name, loss, facts.max_length, vocab_size):
            raise ServiceError(f"datum {number}: {wrong}")


def _wrong(
    datum: Datum, name: str, loss: service_losses.ServiceLoss, longest: int, vocab_size: int
) -> str:
    """What is wrong with it, '' if nothing is."""
    length, shape = len(datum.tokens), datum.targets.shape
    if not 0 < length <= longest:
        return f"it has {length} tokens, and this service takes 1 to {longest} (model.max_length)"
    if shape[0] != length:
        return f"it has {length} tokens and {shape[0]} target_tokens"
    if len(shape) > 1 and not loss.wide:
        return (
            f"it has {shape[1]} target_tokens at each place, and loss_fn={name} takes one: "
            "cross_entropy takes several"
        )
    for what, ids in (("token", datum.tokens), ("target token", datum.targets)):
        if (ids < 0).any() or (ids >= vocab_size).any():
            worst = ids[(ids < 0) | (ids >= vocab_size)][0]
            return f"it has the {what} {worst}, and the model's are 0 to {vocab_size - 1}"
    if set(datum.inputs) != loss.inputs:
        wanted = ", ".join(["target_tokens", *sorted(loss.inputs)])
        there = ", ".join(["target_tokens", *sorted(datum.inputs)])
        return f"its loss_fn_inputs are {there}, and loss_fn={name} takes {wanted}"
    for key, values in datum.inputs.items():
        if values.shape != shape:
            return f"its target_tokens have shape {[*shape]}, and its {key} {[*values.shape]}"
        if not np.isfinite(values).all():
            return f"its {key} hold {values[~np.isfinite(values)][0]}"
    before = datum.inputs[LOGPROBS] if loss.compares else np.zeros(1)
    if (before > ROUNDING).any():
        return f"its {LOGPROBS} hold {before.max()}, and no token's is above 0"
    if loss.marks and not datum.inputs[MARKS].any():
        return f"its {MARKS} is 0 everywhere, and no ratio is left to be its"
    return ""


def batch_of(data: Sequence[Datum], call: LossCall, number: int) -> TrainBatch:
    """The data as one step's samples. `number`: of this batch among the service's, from 1, which
    says when replay is audited."""
    loss, _ = service_losses.find(call.name, call.settings)
    wide = any(one.targets.ndim > 1 for one in data)
    width = max(map(_width, data)) if wide else 0
    # What follows the last token is not fed.
    sequences = [np.append(one.tokens, one.targets.flat[-1]).astype(np.int32) for one in data]
    batch = TrainBatch.from_sequences(sequences, step=number)
    batch.wide = wide
    coefficients = [one.inputs[loss.coefficient] for one in data]
    batch.advantages = [_as_wide(one.astype(np.float32), width) for one in coefficients]
    batch.targets = [_as_wide(one.targets.astype(np.int32), width) for one in data]
    if loss.compares:
        batch.logprobs = [one.inputs[LOGPROBS].astype(np.float32) for one in data]
    if loss.marks:
        batch.marks = [one.inputs[MARKS] != 0 for one in data]
    return batch


def _width(datum: Datum) -> int:
    """Targets at each place."""
    return datum.targets[0].size


def _as_wide(values: np.ndarray, width: int) -> np.ndarray:
    """[N, width], with zeros for what it has not; as it is where nothing is wide: a target without
    a weight is not learned from."""
    if not width:
        return values
    values = values.reshape(len(values), -1)
    return np.pad(values, ((0, 0), (0, width - values.shape[1])))


def logprobs_of(data: Sequence[Datum], found: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The logprobs of each datum's own targets, of what a pass of `batch_of` found."""
    return [
        one.reshape(len(one), -1)[:, : _width(datum)].reshape(datum.targets.shape)
        for datum, one in zip(data, found, strict=True)
    ]
