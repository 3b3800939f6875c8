"""Protobuf in and out: what a forward is asked of, and what forwards and samples have found.

Shape letters as in `backend.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from lora_moe_rl.errors import ServiceError
from lora_moe_rl.service.backend import Datum, LossCall, Passed, Said, Sampled, Top
from lora_moe_rl.service.messages import (
    FLOAT32,
    INT32,
    INT64,
    LENGTH,
    STOP,
    check_known,
    made,
    parsed,
)

TARGETS = "target_tokens"
MOST_DENSE = 64 * 2**20  # bytes that a tensor may have which was sent without its zeros
REDUCTIONS = {"sum", "mean", "min", "max", "slack", "hash2", "unique"}  # that the SDK knows
NO_TOKEN, NO_LOGPROB = 0, -99999.0  # where there is no likeliest token
_DTYPES = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8"), INT32: np.dtype("<i4")}
_INT32 = np.iinfo(np.int32)
_EXACT = 2**24  # integers up to here are float32 as they are


@dataclass(frozen=True)
class PassCall:
    """One forward, of model `model` as its `seq`th request; `message` holds the rest of it."""

    model: str
    seq: int
    backward: bool
    message: Any


def read_pass(content: bytes) -> PassCall:
    """A ForwardBackwardRequest. Raises ServiceError for bytes that are none."""
    message = parsed("ForwardBackwardRequest", content)
    return PassCall(message.model_id, message.seq_id, not message.forward_only, message)


def loss_of(call: PassCall) -> LossCall:
    """Raises ServiceError for a setting that is a text."""
    message = call.message
    if not message.loss_fn:
        raise ServiceError("no loss_fn is named")
    settings = {one.key: one.value for one in message.loss_fn_config}
    for one in message.loss_fn_config_v2:
        if one.value.HasField("text"):
            raise ServiceError(
                f"loss_fn_config[{one.key!r}]={one.value.text!r} is a text, and no loss here reads "
                "one; a loss of your own runs beside you, with forward_backward_custom"
            )
        settings[one.key] = one.value.number
    for name, value in settings.items():
        if not math.isfinite(value):
            raise ServiceError(f"loss_fn_config[{name!r}]={value} is not a finite number")
    return LossCall(message.loss_fn, settings)


def data_of(call: PassCall, max_length: int) -> list[Datum]:
    """The sequences of a forward. Raises ServiceError for what is not text, not of one length, or
    longer than `max_length` tokens, and for what a newer SDK asks for."""
    check_known(call.message)
    if not call.message.data:
        raise ServiceError("there are no data to pass forward")
    return [_datum(one, f"data[{i}]", max_length) for i, one in enumerate(call.message.data)]


def _datum(message: Any, where: str, max_length: int) -> Datum:
    if message.model_input_spans or message.loss_fn_input_spans:
        raise ServiceError(
            f"{where} says where its tokens come from, and no loss here reads that: leave "
            "with_provenance out"
        )
    tokens = _tokens(message.model_input, where)
    if not 1 <= len(tokens) <= max_length:
        raise ServiceError(f"{where} has {len(tokens)} tokens; 1 to {max_length} are served")
    tensors = {one.key: one.value for one in message.loss_fn_inputs}
    if TARGETS not in tensors:
        raise ServiceError(f"{where}.loss_fn_inputs has no {TARGETS}")
    found = {
        name: _values(tensor, f"{where}.loss_fn_inputs[{name!r}]", len(tokens))
        for name, tensor in tensors.items()
    }
    targets = _ids(found.pop(TARGETS), f"{where}.loss_fn_inputs[{TARGETS!r}]")
    inputs = {
        name: _floats(values, f"{where}.loss_fn_inputs[{name!r}]") for name, values in found.items()
    }
    return Datum(tokens, targets, inputs)


def _tokens(chunks: Sequence[Any], where: str) -> np.ndarray:
    parts = []
    for chunk in chunks:
        if not chunk.HasField("encoded_text"):
            kind = next((name for name in ("image", "dmel") if chunk.HasField(name)), "empty")
            raise ServiceError(f"{where}.model_input has a chunk of kind {kind}; only text is read")
        parts.append(_numbers(chunk.encoded_text.tokens, _DTYPES[INT32], f"{where}.model_input"))
    joined = np.concatenate([np.empty(0, np.int32), *parts])
    return _ids(joined, f"{where}.model_input")


def _values(tensor: Any, where: str, length: int) -> np.ndarray:
    """A tensor of [N] or, with several targets at a place, [N, K]."""
    shape = list(tensor.shape) or [length]
    if len(shape) > 2 or shape[0] != length or min(shape) < 1:
        raise ServiceError(
            f"{where} has shape {shape}; one value for each of the {length} tokens of model_input "
            f"is read, [{length}], or several of each, [{length}, K]"
        )
    if tensor.dtype not in _DTYPES:
        raise ServiceError(f"{where} has dtype {tensor.dtype}; float32, int64 and int32 are read")
    dtype = _DTYPES[tensor.dtype]
    if tensor.HasField("sparse_csr"):
        return _of_csr(tensor.sparse_csr, shape, dtype, where)
    values = _numbers(tensor.dense, dtype, where)
    if len(values) != math.prod(shape):
        raise ServiceError(f"{where} has {len(values)} values in shape {shape}")
    return values.reshape(shape)


def _of_csr(csr: Any, shape: list[int], dtype: np.dtype, where: str) -> np.ndarray:
    """The array, with zeros where the sparse form has nothing."""
    values = _numbers(csr.values, dtype, where)
    starts, columns = (
        _numbers(one, _DTYPES[INT64], where) for one in (csr.crow_indices, csr.col_indices)
    )
    counts = np.diff(starts)
    whole = len(starts) == shape[0] + 1 and starts[0] == 0 and (counts >= 0).all()
    whole = whole and starts[-1] == len(values) == len(columns)
    if len(shape) != 2 or not whole or not ((columns >= 0) & (columns < shape[-1])).all():
        raise ServiceError(f"{where} is no sparse tensor (CSR) of shape {shape}")
    if (size := math.prod(shape) * dtype.itemsize) > MOST_DENSE:
        raise ServiceError(
            f"{where} of shape {shape} takes {size:,} bytes, of at most {MOST_DENSE:,}"
        )
    dense = np.zeros(shape, dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return dense


def _numbers(content: bytes, dtype: np.dtype, where: str) -> np.ndarray:
    if len(content) % dtype.itemsize:
        raise ServiceError(f"{where} has {len(content)} bytes: no whole number of {dtype.name}")
    return np.frombuffer(content, dtype)


def _ids(values: np.ndarray, where: str) -> np.ndarray:
    """Token ids as int32."""
    if values.dtype.kind != "i":
        raise ServiceError(f"{where} holds {values.dtype.name}; token ids are integers")
    wrong = values[(values < 0) | (values > _INT32.max)]
    if len(wrong):
        raise ServiceError(f"{where} holds {wrong[0]}, which is no token id")
    return values.astype(np.int32)


def _floats(values: np.ndarray, where: str) -> np.ndarray:
    if values.dtype.kind == "i" and (np.abs(values) > _EXACT).any():
        raise ServiceError(f"{where} holds an integer that float32 cannot hold; send float32")
    floats = values.astype(np.float32)
    wrong = floats[~np.isfinite(floats)]
    if len(wrong):
        raise ServiceError(f"{where} holds {wrong[0]}: only finite numbers can be learned from")
    return floats


def passed(found: Passed) -> bytes:
    """A ForwardBackwardOutput: logprobs of each datum, and metrics."""
    for name in found.metrics:
        assert name.count(":") == 1 and name.partition(":")[2] in REDUCTIONS, name
    output = made("ForwardBackwardOutput", loss_fn_output_type="ArrayRecord")
    for width, some in groupby(found.logprobs, lambda one: one.shape[1:]):
        output.loss_fn_outputs.append(
            _record([np.ascontiguousarray(o, "<f4") for o in some], width)
        )
    for name, value in found.metrics.items():
        output.metrics.add(key=name, value=value)
    return output.SerializeToString()


def _record(logprobs: list[np.ndarray], width: tuple[int, ...]) -> Any:
    """An ArrayRecord of data whose targets are as many at each place."""
    ends = np.cumsum([0, *(one.nbytes for one in logprobs)]).astype("<i8")
    batched = made(
        "BatchedTensor",
        data=b"".join(one.tobytes() for one in logprobs),
        offsets=ends.tobytes(),
        dtype=FLOAT32,
        trailing_shape=width,
    )
    record = made("ArrayRecord", type_tag="ArrayRecord", num_datums=len(logprobs))
    record.fields.add(key="logprobs", value=batched)
    return record


def sampled(found: Sampled) -> bytes:
    """A SampleResponse."""
    response = made("SampleResponse", prompt_cache_hit_tokens=found.cached)
    response.sequences.extend(map(_sequence, found.samples))
    if found.prompt_logprobs is not None:
        response.prompt_logprobs = found.prompt_logprobs.astype("<f4").tobytes()
    if found.top_prompt is not None:
        response.topk_prompt_logprobs.CopyFrom(_top(found.top_prompt))
    return response.SerializeToString()


def _sequence(said: Said) -> Any:
    sequence = made(
        "SampledSequence",
        stop_reason={"stop": STOP, "length": LENGTH}[said.finish_reason],
        tokens=said.token_ids.astype("<i4").tobytes(),
        logprobs=said.logprobs.astype("<f4").tobytes(),
    )
    if said.top is not None:
        sequence.topk_sampled_logprobs.CopyFrom(_top(said.top))
    return sequence


def _top(top: Top) -> Any:
    """Where a logprob is NaN there is no token."""
    missing = np.isnan(top.logprobs)
    ids, logprobs = top.token_ids.copy(), top.logprobs.copy()
    ids[missing], logprobs[missing] = NO_TOKEN, NO_LOGPROB
    num_places, k = ids.shape
    return made(
        "TopLogprobs",
        token_ids=ids.astype("<i4").tobytes(),
        logprobs=logprobs.astype("<f4").tobytes(),
        k=k,
        length=num_places,
    )
