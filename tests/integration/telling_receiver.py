"""A vLLM worker that tells what serves its routed experts."""

from __future__ import annotations

from lora_moe_rl.refit.receiver import Receiver


class TellingReceiver(Receiver):
    def experts(self) -> list[str]:
        """The class that serves them, and the dtype of their weights, of all layers."""
        found = set()
        for module in self.model_runner.model.modules():
            kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
            if kernel is not None and hasattr(module, "routed_experts"):
                weight = module.routed_experts.w13_weight
                found.add(f"{type(kernel.fused_experts).__name__} {weight.dtype}")
        return sorted(found)
