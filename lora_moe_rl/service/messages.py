"""The protobuf messages that Tinker's clients send and read: of their fields those that are used.

Names and numbers are the wire format. Enums are declared as the numbers they are, maps as the
repeated messages they are, and what is only refused as bytes: all that is the same on the wire.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from lora_moe_rl.errors import ServiceError

FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4  # DType
STOP, LENGTH = 0, 1  # StopReason

# {message: "field number type", with a star before what is repeated}
_FIELDS = {
    "Tokens": "tokens 1 bytes",
    "Chunk": "encoded_text 1 Tokens, image 2 bytes, dmel 3 bytes",
    "SparseCsr": "values 1 bytes, crow_indices 2 bytes, col_indices 3 bytes",
    "Tensor": "dense 1 bytes, sparse_csr 2 SparseCsr, dtype 3 int32, shape 4 *int64",
    "NamedTensor": "key 1 string, value 2 Tensor",
    "Datum": "model_input 1 *Chunk, loss_fn_inputs 2 *NamedTensor, "
    "model_input_spans 3 *bytes, loss_fn_input_spans 4 *bytes",
    "Number": "key 1 string, value 2 double",
    "Value": "number 1 double, text 2 string",
    "NamedValue": "key 1 string, value 2 Value",
    "ForwardBackwardRequest": "model_id 1 string, seq_id 2 int32, data 3 *Datum, loss_fn 4 string, "
    "loss_fn_config 5 *Number, forward_only 6 bool, loss_fn_config_v2 7 *NamedValue",
    "BatchedTensor": "data 1 bytes, offsets 2 bytes, dtype 3 int32, trailing_shape 4 *int64",
    "NamedBatchedTensor": "key 1 string, value 2 BatchedTensor",
    "ArrayRecord": "type_tag 1 string, fields 2 *NamedBatchedTensor, num_datums 3 int64",
    "ForwardBackwardOutput": "loss_fn_output_type 1 string, loss_fn_outputs 2 *ArrayRecord, "
    "metrics 3 *Number",
    "TopLogprobs": "token_ids 1 bytes, logprobs 2 bytes, k 3 uint32, length 4 uint32",
    "SampledSequence": "stop_reason 1 int32, tokens 2 bytes, logprobs 3 bytes, "
    "topk_sampled_logprobs 4 TopLogprobs",
    "SampleResponse": "sequences 1 *SampledSequence, prompt_logprobs 2 bytes, "
    "topk_prompt_logprobs 3 TopLogprobs, prompt_cache_hit_tokens 4 int32",
}
_PACKAGE = "tinker_wire"


def _field(text: str) -> descriptor_pb2.FieldDescriptorProto:
    name, number, kind = text.split()
    field = descriptor_pb2.FieldDescriptorProto(name=name, number=int(number))
    repeated, kind = kind.startswith("*"), kind.removeprefix("*")
    field.label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
    if kind in _FIELDS:
        field.type, field.type_name = field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    else:
        field.type = descriptor_pb2.FieldDescriptorProto.Type.Value(f"TYPE_{kind.upper()}")
    return field


def _made() -> dict[str, Any]:
    """The messages in proto2, where each field tells whether it is there, and in a pool of our own:
    the SDK may be in the same process."""
    file = descriptor_pb2.FileDescriptorProto(name="wire.proto", package=_PACKAGE, syntax="proto2")
    for name, fields in _FIELDS.items():
        file.message_type.add(name=name).field.extend(map(_field, fields.split(", ")))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClassesForFiles([file.name], pool)


_CLASSES = _made()


def made(name: str, **fields: Any) -> Any:
    """A message of one of the names above."""
    return _CLASSES[f"{_PACKAGE}.{name}"](**fields)


def parsed(name: str, content: bytes) -> Any:
    """Raises ServiceError for what is no such message."""
    message = made(name)
    try:
        message.ParseFromString(content)
    except DecodeError as error:
        raise ServiceError(f"the body is not a {name} of protobuf: {error}") from error
    return message


def check_known(message: Any) -> None:
    """Raises ServiceError for a message with a field, at any depth, that is not declared here: what
    it asks for would not be done."""
    for field in UnknownFieldSet(message):
        raise ServiceError(
            f"field {field.field_number} of {message.DESCRIPTOR.name} is not known here: leave out "
            "what a newer SDK than 0.38 sends it for"
        )
    for declared, value in message.ListFields():
        if declared.message_type is not None:
            for one in [value] if isinstance(value, Message) else value:
                check_known(one)
