"""Router decisions at as many bits as an expert id needs. What makes tensors of packed rows is in
`op.py`: importing this package imports no torch."""

from lora_moe_rl.kernels.route_codec.arrays import pack_array, unpack_array
from lora_moe_rl.kernels.route_codec.cut import cut_array
from lora_moe_rl.kernels.route_codec.layout import RowLayout

__all__ = ["RowLayout", "cut_array", "pack_array", "unpack_array"]
