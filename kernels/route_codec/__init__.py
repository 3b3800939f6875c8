"""Router decisions at as many bits as an expert id needs, and Megatron's routing map from them."""

from lora_moe_rl.kernels.route_codec.arrays import pack_array, unpack_array
from lora_moe_rl.kernels.route_codec.cut import cut_array
from lora_moe_rl.kernels.route_codec.layout import RowLayout
from lora_moe_rl.kernels.route_codec.op import layer_ids, pack, routing_map, unpack

__all__ = [
    "RowLayout",
    "cut_array",
    "layer_ids",
    "pack",
    "pack_array",
    "routing_map",
    "unpack",
    "unpack_array",
]
