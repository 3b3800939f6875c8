"""What makes a critic of adapters on the frozen base: a row `[1, hidden]` in the place of the head.

It stands beside the layers of an `Adapters` and has the same face: it is trained, clipped, saved
and switched with them. It reads what the language-model head reads, behind the last norm, and lies
whole on every rank of the last pipeline stage.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel as mtp

from lora_moe_rl.adapters.layers import Slice, Switch
from lora_moe_rl.adapters.sharding import Kind, RankLayout
from lora_moe_rl.adapters.spec import VALUE_HEAD


class ValueHead(torch.nn.Module):
    """While its switch is on, the model's output layer gives values, float32 `[T, 1, 1]`, and no
    logits. They are 0 at the start."""

    kind: Kind = "replicated"
    sites = ()

    def __init__(self, output_layer: torch.nn.Module, layout: RankLayout):
        """`output_layer`: of megatron-core, whose forward is wrapped."""
        super().__init__()
        self.layout, self.switch = layout, Switch()
        rows = output_layer.weight
        self.weight = torch.nn.Parameter(torch.zeros(1, rows.shape[1], device=rows.device))
        logits = output_layer.forward

        def forward(hidden: torch.Tensor, *args, **options):
            if self.switch.on:
                return self(hidden), None
            return logits(hidden, *args, **options)

        output_layer.forward = forward

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden `[T / tp, 1, H]`, of this rank's part of the sequence."""
        values = F.linear(hidden.float(), self.weight)
        if self.layout.tp[1] == 1:
            return values
        # All ranks compute the same loss of all values: each takes the gradient of its own rows.
        return mtp.gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)

    def parameters_of(self, tensor: str) -> list[torch.nn.Parameter]:
        return [self.weight] if tensor == "A" else []

    def slices(self) -> Iterator[Slice]:
        exported = self.layout.exports(self.kind, "A")
        yield Slice(VALUE_HEAD, self.weight, (Ellipsis,), (0, 0), exported)
