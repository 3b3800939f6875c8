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
    length = len(datum.tokens)
    if not 0 < length <= longest:
        return f"it has {length} tokens, and this service takes 1 to {longest} (model.max_length)"
    if len(datum.targets) != length:
        return f"it has {length} tokens and {len(datum.targets)} target_tokens"
    for what, ids in (("token", datum.tokens), ("target token", datum.targets)):
        if (ids < 0).any() or (ids >= vocab_size).any():
            worst = ids[(ids < 0) | (ids >= vocab_size)][0]
            return f"it has the {what} {worst}, and the model's are 0 to {vocab_size - 1}"
    if set(datum.inputs) != loss.inputs:
        wanted = ", ".join(["target_tokens", *sorted(loss.inputs)])
        there = ", ".join(["target_tokens", *sorted(datum.inputs)])
        return f"its loss_fn_inputs are {there}, and loss_fn={name} takes {wanted}"
    for key, values in datum.inputs.items():
        if len(values) != length:
            return f"it has {length} tokens and {len(values)} {key}"
        if not np.isfinite(values).all():
            return f"its {key} hold {values[~np.isfinite(values)][0]}"
    return ""


def batch_of(data: Sequence[Datum], call: LossCall, number: int) -> TrainBatch:
    """As one step's samples. `number`: of this batch among the service's, from 1, which says when
    replay is audited."""
    loss, _ = service_losses.find(call.name, call.settings)
    sequences = [np.append(one.tokens, one.targets[-1]).astype(np.int32) for one in data]
    batch = TrainBatch.from_sequences(sequences, step=number)
    batch.advantages = [one.inputs[loss.coefficient].astype(np.float32) for one in data]
    if loss.compares:
        batch.logprobs = [one.inputs["logprobs"].astype(np.float32) for one in data]
    batch.targets = [one.targets.astype(np.int32) for one in data]
    return batch
