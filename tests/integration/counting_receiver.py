"""A vLLM worker that tells how much it holds."""

from __future__ import annotations

from lora_moe_rl.refit.receiver import Receiver


class CountingReceiver(Receiver):
    def count(self) -> dict[str, int]:
        """Elements of the base, and of adapter slots, each buffer once."""
        base = sum(tensor.numel() for tensor in self.model_runner.model.parameters())
        places = [place for some in self._refit_places.values() for place in some]
        buffers = {place.buffer.data_ptr(): place.buffer.numel() for place in places}
        return {"base": base, "slots": sum(buffers.values())}
