"""The vLLM worker of `verify refit`: ours, and a look at what vLLM's own loader put into a slot."""

from __future__ import annotations

from typing import Any

import torch

from lora_moe_rl.refit.receiver import Receiver, answer


class VerifiedReceiver(Receiver):
    """Methods of every worker."""

    @answer
    def verify_unlike(
        self, version: int, files_id: int, names: list[list], tolerance: float
    ) -> dict[str, Any]:
        """Compares the slot of `version` with that of vLLM's adapter `files_id`. `names`: (module,
        part, site). Differences are relative to the largest value of the tensor."""
        slots = self._refit_slots
        ours = slots.versions()[version]
        theirs = slots.manager.lora_index_to_id.index(files_id)
        unlike = []
        for module, part, site in names:
            for matrix in ("A", "B"):
                buffer = slots.buffer(module, part, matrix)
                got, expected = buffer[ours].float(), buffer[theirs].float()
                error = (got - expected).abs() / expected.abs().max().clamp(min=1e-30)
                if not (error <= tolerance).all():  # NaN is unlike everything
                    fault = {"tensor": f"{site}.{matrix}", "worker": self.engine_rank}
                    unlike.append(
                        fault | {"error": float(error.max()), "experts": _experts(error, tolerance)}
                    )
        return {"unlike": unlike, "compared": 2 * len(names)}


def _experts(error: torch.Tensor, tolerance: float) -> list[int] | None:
    """The experts of this worker that differ; None for a tensor without experts."""
    if error.dim() == 2:
        return None
    return (~(error.flatten(1) <= tolerance).all(1)).nonzero().flatten().tolist()
