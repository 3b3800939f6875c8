"""A vLLM worker that tells how much it holds."""

from __future__ import annotations

from lora_moe_rl.refit.receiver import Receiver

EXPERTS = ("routed_experts.w13_weight", "routed_experts.w2_weight")


class CountingReceiver(Receiver):
    def count(self) -> dict[str, int]:
        """Elements of routed experts, and of adapter slots, each buffer once. Of the rest of the
        base vLLM's CPU build keeps copies in an order of its own."""
        named = self.model_runner.model.named_parameters()
        experts = sum(one.numel() for name, one in named if name.endswith(EXPERTS))
        places = [place for some in self._refit_places.values() for place in some]
        buffers = {place.buffer.data_ptr(): place.buffer.numel() for place in places}
        return {"experts": experts, "slots": sum(buffers.values())}
