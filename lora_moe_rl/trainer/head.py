"""The frozen output head: log-probabilities of given tokens, without all logits at once.

hidden [F, H] ──rows that count, some at a time──> logits ──> logprob, entropy,  (W[y] - p W) / t
                                                              kept: [rows, H] and no logits

Nothing of the head is trained, so that all a backward needs is the gradient of each logprob with
respect to its row of hidden states, and that does not depend on the loss: it is formed beside the
logprob, and the backward scales it. Where the loss goes by the entropy too, its gradient is formed
and kept in the same way: -(p (log p + entropy)) W / t. So is that of a divergence from a teacher
(`taught_head.py`). Logits live for a few rows (`logits.py`). `plain_head.py` is the same by
autograd.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from lora_moe_rl.kernels.backend import on_device
from lora_moe_rl.router_replay.routes import context_shard
from lora_moe_rl.trainer.context_parallel import put_together
from lora_moe_rl.trainer.logits import rows_at_once
from lora_moe_rl.trainer.taught_head import Compared, TeacherTokens

if TYPE_CHECKING:
    from lora_moe_rl.algorithms.parts.divergence import Divergence
    from lora_moe_rl.trainer.engine import Work

LOWEST = -1e4  # below it exp is 0; a padded entry's -inf times 0 would be NaN


@dataclass(frozen=True)
class Head:
    """Gives logprobs, float32 [T], in the place of logits: an `output_processor` of megatron-core,
    whose context is the micro-batch. They are 0 for tokens that are not of its response.

    With gradients, or if `tells_entropy`, the work gets `entropy` too, float32 [T], in nats; it has
    a gradient of its own if `trains_entropy`. With gradients and a `divergence` the work gets what
    that is of each token too, float32 [T], with a gradient of its own. `temperature` is that of the
    rollout, for old, current and reference logprobs alike; `vocab_size` is the model's: a
    vocabulary that is padded for tensor parallelism has rows that no token owns.
    """

    temperature: float
    vocab_size: int
    trains_entropy: bool = False
    tells_entropy: bool = False
    divergence: Divergence | None = None

    def __call__(
        self,
        *,
        hidden_states: torch.Tensor,
        output_layer: torch.nn.Module,
        output_weight: torch.Tensor | None,
        context: Work,
        **_: Any,
    ) -> torch.Tensor:
        """hidden_states `[F / (cp tp), 1, H]`; output_weight: of tied embeddings, if they are."""
        asked = self.asked(hidden_states, output_layer, output_weight, context)
        trained = Trained.NOTHING
        if torch.is_grad_enabled():
            trained = Trained.ENTROPY_TOO if self.trains_entropy else Trained.LOGPROBS
        told, taught = self.tells_entropy or trained > Trained.NOTHING, None
        if trained and self.divergence is not None:
            likeliest, device = context.data.likeliest, asked.hidden.device
            taught = TeacherTokens.of(self.divergence, likeliest, self.vocab_size, device)
        found = LogProbs.apply(*asked, self.temperature, trained, told, taught)
        cp = ps.get_context_parallel_group()
        if told:
            context.entropy = put_together(found[1], cp)
        if taught is not None:
            context.divergence = put_together(found[2], cp)
        return put_together(found[0], cp)

    def asked(
        self,
        hidden: torch.Tensor,
        output_layer: torch.nn.Module,
        output_weight: torch.Tensor | None,
        context: Work,
    ) -> Asked:
        """What this rank computes of a micro-batch."""
        weight = output_layer.weight if output_weight is None else output_weight
        if ps.get_tensor_model_parallel_world_size() > 1:
            # A rank's gradient is of its part of the vocabulary: the backward sums them.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        data, device = context.data, hidden.device
        labels = on_device(torch.from_numpy(data.labels.astype(np.int64)), device)
        # Of the response's tokens those that are predicted from what this rank was fed.
        mine = context_shard(len(data.fed))
        at = data.fed_at
        response = (data.response & (at >= mine.start) & (at < mine.stop)).nonzero()[0]
        rows, fed_at = (
            on_device(torch.from_numpy(one), device)
            for one in (response, at[response] - mine.start)
        )
        vocabulary = Vocabulary(
            weight.detach(),
            ps.get_tensor_model_parallel_rank() * len(weight),
            self.vocab_size,
            ps.get_tensor_model_parallel_group(),
        )
        return Asked(hidden.squeeze(1), labels, rows, fed_at, vocabulary)


class Vocabulary(NamedTuple):
    """A rank's part of the head: its rows of weights `[V / tp, H]`, the token of the first, how
    many tokens there are on all ranks, and the group of ranks (None: this one alone)."""

    weight: torch.Tensor
    first: int
    size: int
    group: dist.ProcessGroup | None

    def places(self, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows in `weight` of tokens, 0 for those of other ranks; and which are here."""
        places = labels - self.first
        here = (places >= 0) & (places < len(self.weight))
        return places.where(here, 0), here


class Asked(NamedTuple):
    """hidden `[F, H]`; labels int64 `[T]`, or `[T, K]` of several tokens at a place; rows int64
    `[R]`, the places that are asked for, and fed_at int64 `[R]`, which hidden state is each's."""

    hidden: torch.Tensor
    labels: torch.Tensor
    rows: torch.Tensor
    fed_at: torch.Tensor
    vocabulary: Vocabulary


class Trained(IntEnum):
    """What a backward pass is to follow."""

    NOTHING = 0
    LOGPROBS = 1
    ENTROPY_TOO = 2


class LogProbs(torch.autograd.Function):
    """What is asked, with one label at a place -> logprobs, entropy, and the divergence from what
    is `taught`, float32 `[T]`, 0 but in `rows`. Where nothing is `trained` there is no entropy,
    unless it is to be `told`. The gradient with respect to hidden is this rank's part of a sum;
    entropy has one if it is trained too."""

    @staticmethod
    def forward(
        ctx,
        hidden,
        labels,
        rows,
        fed_at,
        vocabulary: Vocabulary,
        temperature,
        trained: Trained,
        told: bool = False,
        taught: TeacherTokens | None = None,
    ):
        logprobs = torch.zeros(len(labels), dtype=torch.float32, device=hidden.device)
        entropy, divergence = torch.zeros_like(logprobs), torch.zeros_like(logprobs)
        # Which of the outputs have gradients: of each [R, H].
        ctx.with_slopes = [*range(trained), *([2] if taught is not None else [])]
        slopes = [hidden.new_empty(len(rows), hidden.shape[1]) for _ in ctx.with_slopes]
        for part in parts_of(len(rows), len(vocabulary.weight)):
            some = rows[part]
            states = hidden[fed_at[part]]
            own = None if taught is None else taught.at(some)
            found = _of_rows(states, labels[some], vocabulary, temperature, trained, told, own)
            logprobs[some] = found.logprobs
            if found.entropy is not None:
                entropy[some] = found.entropy
            if found.divergence is not None:
                divergence[some] = found.divergence
            for every, these in zip(slopes, found.slopes, strict=True):
                every[part] = these
        if trained:
            ctx.save_for_backward(rows, fed_at, *slopes)
            ctx.num_fed = len(hidden)
        outputs = (logprobs, entropy, divergence)
        still = [one for i, one in enumerate(outputs) if i and i not in ctx.with_slopes]
        ctx.mark_non_differentiable(*still)
        return outputs

    @staticmethod
    def backward(ctx, *of_outputs):
        rows, fed_at, *slopes = ctx.saved_tensors
        gradient = slopes[0].new_zeros(ctx.num_fed, slopes[0].shape[1])
        # One hidden state, of a prompt's last token, may predict first tokens of several samples.
        for each, output in zip(slopes, ctx.with_slopes, strict=True):
            given = of_outputs[output][rows, None]
            gradient.index_add_(0, fed_at, each * given.to(each.dtype))
        return gradient, *[None] * 8


class _Found(NamedTuple):
    logprobs: torch.Tensor
    entropy: torch.Tensor | None = None
    slopes: tuple[torch.Tensor, ...] = ()
    divergence: torch.Tensor | None = None


def parts_of(rows: int, columns: int) -> Iterator[slice]:
    """Rows of `columns` logits each, as many at a time as there may be."""
    at_once = rows_at_once(columns)
    return (slice(start, start + at_once) for start in range(0, rows, at_once))


def shifted_logits(
    hidden: torch.Tensor, vocabulary: Vocabulary, temperature: float
) -> torch.Tensor:
    """float32 `[R, V / tp]` of a few rows, less the largest of each over all ranks."""
    weight, first, size, group = vocabulary
    logits = (hidden @ weight.t()).float().div_(temperature)
    if first + len(weight) > size:
        logits[:, max(0, size - first) :] = float("-inf")
    top = logits.amax(dim=-1)
    all_reduce(top, dist.ReduceOp.MAX, group)
    return logits.sub_(top[:, None])


def _of_rows(
    hidden: torch.Tensor,
    labels: torch.Tensor,
    vocabulary: Vocabulary,
    temperature: float,
    trained: Trained,
    told: bool,
    taught: TeacherTokens | None = None,
) -> _Found:
    """What is found for a few rows."""
    weight, _, _, group = vocabulary
    logits = shifted_logits(hidden, vocabulary, temperature)
    places, here = vocabulary.places(labels)
    of_label = logits.gather(1, places[:, None])[:, 0].where(here, 0)
    if not (trained or told):
        sums = torch.stack([logits.exp_().sum(-1), of_label])
        all_reduce(sums, dist.ReduceOp.SUM, group)
        return _Found(sums[1] - sums[0].log())
    compared = None
    if taught is not None:
        compared = Compared(taught, logits, *vocabulary.places(taught.ids))
    shares = logits.exp()
    weighted = logits.clamp_min_(LOWEST).mul_(shares)
    sums = torch.stack([shares.sum(-1), of_label, weighted.sum(-1)])
    if compared is not None:
        sums = torch.cat([sums, compared.sums(shares).t()])
    all_reduce(sums, dist.ReduceOp.SUM, group)
    total = sums[0].log()
    entropy = total - sums[2] / sums[0]
    if not trained:
        return _Found(sums[1] - total, entropy)
    shares.div_(sums[0][:, None])
    own = weight[places].where(here[:, None], 0)
    slopes = [(own - shares.to(weight.dtype) @ weight).div_(temperature)]
    if trained == Trained.ENTROPY_TOO:
        # p (log p + entropy), where log p is a shifted logit less the total.
        weighted.div_(sums[0][:, None]).addcmul_(shares, (entropy - total)[:, None])
        slopes.append((weighted.to(weight.dtype) @ weight).div_(-temperature))
    if compared is None:
        return _Found(sums[1] - total, entropy, tuple(slopes))
    divergence, of_logits = compared.found(sums[3:].t(), total, shares)
    slopes.append((of_logits.to(weight.dtype) @ weight).div_(temperature))
    return _Found(sums[1] - total, entropy, tuple(slopes), divergence)


def all_reduce(tensor: torch.Tensor, op: Any, group: dist.ProcessGroup | None) -> None:
    """Reduces a tensor in place."""
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op=op, group=group)
