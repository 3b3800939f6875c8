"""The frozen output head with several targets at one place, each with a weight: distributions are
learned from so, and from their likeliest tokens.

    logprobs [T, K] of the targets        the weighted sum of a place's: what is learned from

Weights are known before the forward, so that one gradient stands for all targets of a place, and
logits are computed once, whatever K is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps

from lora_moe_rl.kernels.backend import on_device
from lora_moe_rl.trainer.context_parallel import put_together
from lora_moe_rl.trainer.head import Asked, Head, all_reduce, parts_of, shifted_logits

if TYPE_CHECKING:
    from lora_moe_rl.trainer.engine import Work


@dataclass(frozen=True)
class WideHead(Head):
    """Gives the weighted sums, float32 [T]; weights are the micro-batch's `advantages`, [T, K]. The
    work gets `known["score"]`, logprobs of all targets, float32 [T, K]."""

    def __call__(
        self,
        *,
        hidden_states: torch.Tensor,
        output_layer: torch.nn.Module,
        output_weight: torch.Tensor | None,
        context: Work,
        **_: Any,
    ) -> torch.Tensor:
        asked = self.asked(hidden_states, output_layer, output_weight, context)
        weights = on_device(torch.from_numpy(context.data.advantages), asked.hidden.device)
        # A micro-batch without samples has no width.
        labels, weights = (one.view(len(one), -1) for one in (asked.labels, weights))
        asked = asked._replace(labels=labels)
        trained = torch.is_grad_enabled()
        sums, logprobs = WideLogProbs.apply(*asked, weights, self.temperature, trained)
        cp = ps.get_context_parallel_group()
        context.known["score"] = put_together(logprobs.detach(), cp)
        return put_together(sums, cp)


class WideLogProbs(torch.autograd.Function):
    """What is asked, and weights float32 `[T, K]` -> their sums, float32 `[T]`, and logprobs,
    float32 `[T, K]`, which have no gradient; 0 but in `rows`."""

    @staticmethod
    def forward(ctx, hidden, labels, rows, fed_at, vocabulary, weights, temperature, trained: bool):
        asked = Asked(hidden, labels, rows, fed_at, vocabulary)
        logprobs = torch.zeros_like(weights)
        slopes = hidden.new_empty(len(rows) if trained else 0, hidden.shape[1])
        for part in parts_of(len(rows), len(vocabulary.weight)):
            some = rows[part]
            found, slope = _of_rows(asked, part, weights[some], temperature, trained)
            logprobs[some] = found
            if slope is not None:
                slopes[part] = slope
        ctx.save_for_backward(rows, fed_at, slopes)
        ctx.num_fed = len(hidden)
        ctx.mark_non_differentiable(logprobs)
        return (logprobs * weights).sum(-1), logprobs

    @staticmethod
    def backward(ctx, *of_outputs):
        rows, fed_at, slopes = ctx.saved_tensors
        of_sums = of_outputs[0][rows, None].to(slopes.dtype)
        gradient = slopes.new_zeros(ctx.num_fed, slopes.shape[1])
        gradient.index_add_(0, fed_at, slopes * of_sums)
        return gradient, *[None] * 7


def _of_rows(
    asked: Asked, part: slice, weights: torch.Tensor, temperature: float, trained: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(Logprobs `[R, K]` of a few rows, this rank's part of the gradient of their weighted sum)."""
    vocabulary = asked.vocabulary
    logits = shifted_logits(asked.hidden[asked.fed_at[part]], vocabulary, temperature)
    places, here = vocabulary.places(asked.labels[asked.rows[part]])
    of_labels = logits.gather(1, places).where(here, 0)
    shares = logits.exp_()
    sums = torch.cat([shares.sum(-1, keepdim=True), of_labels], 1)
    all_reduce(sums, dist.ReduceOp.SUM, vocabulary.group)
    total, of_labels = sums[:, :1], sums[:, 1:]
    logprobs = of_labels - total.log()
    if not trained:
        return logprobs, None
    # Of each logit: the weight of the targets that it is, less its share of all weights.
    of_logits = shares.div_(total).mul_(-weights.sum(-1, keepdim=True))
    of_logits.scatter_add_(1, places, weights.where(here, 0))
    weight = vocabulary.weight
    return logprobs, (of_logits.to(weight.dtype) @ weight).div_(temperature)
