"""Pre-training of a tiny model on arithmetic, to an accuracy that leaves reinforcement learning
something to do.

First the model reads right answers until it knows most of them. Then it imitates a teacher who
often slips (writes another digit than he means), so that its own samples at temperature 1 are right
about a third of the time while its most likely answers stay right. It then knows more than it
shows, as a base model does, and a reward can bring that out within a few steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from lora_moe_rl.errors import ModelError
from lora_moe_rl.tiny.arithmetic import MAX_ANSWER_TOKENS, MAX_PROMPT_TOKENS, problem
from lora_moe_rl.tiny.muon import Muon
from lora_moe_rl.tiny.tokenizer import token_id

IGNORE = -100  # label of a position without a target
DIGIT_IDS = [*b"0123456789"]
PROBLEM_TOKENS = MAX_PROMPT_TOKENS + MAX_ANSWER_TOKENS


@dataclass(frozen=True)
class Recipe:
    """Constants of the pre-training; a part of the key under which a made model is cached."""

    steps: int  # with right answers
    turns: int = 1  # problems of a sequence, one after another
    seed: int = 0
    num_threads: int = 1
    batch_size: int = 64
    warmup_steps: int = 20
    muon_lr: float = 1e-2
    adam_lr: float = 5e-3  # embeddings, head, norms
    wide_lr: float = 3e-4  # Adam's too: matrices so wide that Muon is slow, of 512 inputs and more
    clip_grad: float = 1.0
    slip_steps: int = 100
    slips: float = 0.33  # share of the digits
    slip_lr: float = 1e-3  # Adam's, for everything
    # What must come out: the share of samples at temperature 1 that are right.
    accuracy: tuple[float, float] = (0.20, 0.60)
    eval_every: int = 60
    eval_problems: int = 512


RECIPES = {
    "qwen3_moe": Recipe(steps=340),
    "deepseek_v3": Recipe(steps=440, slips=0.27),
    "qwen3_moe-turns": Recipe(steps=200, turns=3, batch_size=24),
    "deepseek_v3-turns": Recipe(steps=300, turns=3, batch_size=24, slips=0.27),
}


@dataclass(frozen=True)
class Accuracy:
    """`sampled`: the chance that a sample at temperature 1 is exactly right, end token included.
    `greedy`: the share of problems whose most likely tokens are exactly right. Where a sequence has
    several problems, each stands behind right answers of those before it."""

    sampled: float
    greedy: float


def encode(*solved: tuple[str, str]) -> tuple[list[int], list[int]]:
    """Input ids and next-token labels of problems with their answers, one after another; both of
    PROBLEM_TOKENS a problem."""
    ids, labels = [], []
    for prompt, answer in solved:
        told = [*answer.encode(), token_id("<eos>")]
        ids += [*prompt.encode(), *told]
        labels += [IGNORE] * (len(prompt) - 1) + told + [IGNORE]
    padding = PROBLEM_TOKENS * len(solved) - len(ids)
    return ids + [token_id("<pad>")] * padding, labels + [IGNORE] * padding


def draw_batch(rng: random.Random, size: int, turns: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Input ids and labels, int64 [size, turns * PROBLEM_TOKENS]. The padding is on the right,
    where a causal model does not see it."""
    drawn = (encode(*(problem(rng) for _ in range(turns))) for _ in range(size))
    ids, labels = zip(*drawn, strict=True)
    return torch.tensor(ids), torch.tensor(labels)


@torch.no_grad()
def measure(model: PreTrainedModel, ids: torch.Tensor, labels: torch.Tensor) -> Accuracy:
    """Exact accuracies on these problems, from one forward.

    The chance of sampling an answer is the product of its tokens' probabilities, so that nothing
    needs to be sampled and the figure has no sampling noise.
    """
    logits = model(input_ids=ids, use_cache=False).logits
    logprobs = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    sampled = by_problem(logprobs, labels).exp().mean()
    missed = (logits.argmax(-1) != labels).to(logprobs.dtype)
    greedy = (by_problem(missed, labels) == 0).float().mean()
    return Accuracy(sampled.item(), greedy.item())


def by_problem(values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sums of `values` over the answer of each problem, end token included: [B, T] to [B, turns],
    for sequences of equally many problems."""
    ends = (labels == token_id("<eos>")).long()
    number = ends.cumsum(-1) - ends
    turns = int(ends.sum(-1)[0])
    sums = values.new_zeros(len(values), turns + 1)  # the last for what follows the last problem
    return sums.scatter_add(1, number, values * (labels != IGNORE))[:, :turns]


def imitation_loss(logits: torch.Tensor, labels: torch.Tensor, slips: float) -> torch.Tensor:
    """Mean cross-entropy against a teacher who writes each digit wrong with probability `slips`.

    The teacher's distribution is the target itself, not draws from it: the other nine digits are
    equally likely, and the end token is always right. `logits` is [..., V], `labels` [...].
    """
    valid = labels != IGNORE
    logprobs, labels = logits[valid].log_softmax(-1), labels[valid]
    right = logprobs.gather(-1, labels[:, None])[:, 0]
    wrong = (logprobs[:, DIGIT_IDS].sum(-1) - right) / (len(DIGIT_IDS) - 1)
    slips_here = slips * torch.isin(labels, torch.tensor(DIGIT_IDS)).to(logprobs.dtype)
    return -((1 - slips_here) * right + slips_here * wrong).mean()


def pretrain(
    model: PreTrainedModel, recipe: Recipe, on_eval: Callable[[float, Accuracy], None]
) -> Accuracy:
    """Train `model` in place; returns the accuracies it ends with.

    `on_eval(share_of_steps_done, accuracy)` is called after each evaluation. Raises ModelError when
    the accuracy is not what it should be.
    """
    rng = random.Random(recipe.seed)
    held_out = draw_batch(
        random.Random(recipe.seed + 1), recipe.eval_problems // recipe.turns, recipe.turns
    )
    optimizers = _optimizers(model, recipe)
    num_steps = recipe.steps + recipe.slip_steps
    with _threads(recipe.num_threads):
        for step in range(num_steps):
            if step == recipe.steps:
                optimizers = [_adam([*model.parameters()], recipe.slip_lr)]
            lr_scale, slips = schedule(step, recipe)
            ids, labels = draw_batch(rng, recipe.batch_size, recipe.turns)
            logits = model(input_ids=ids, use_cache=False).logits
            imitation_loss(logits, labels, slips).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_grad)
            _step(optimizers, lr_scale)
            if (step + 1) % recipe.eval_every == 0:
                on_eval((step + 1) / num_steps, measure(model, *held_out))
        accuracy = measure(model, *held_out)
    low, high = recipe.accuracy
    if not low <= accuracy.sampled <= high:
        raise ModelError(
            f"the tiny model came out with {accuracy.sampled:.1%} of its samples right, not with "
            f"{low:.0%} to {high:.0%}; `lora-moe-rl doctor` shows whether torch and transformers "
            "are those of the requirements"
        )
    return accuracy


def schedule(step: int, recipe: Recipe) -> tuple[float, float]:
    """The learning rates' factor, and the slips. Both phases end with rates that go to nearly 0:
    the model knows a tenth more for it."""
    if step < recipe.steps:
        warm_up = (step + 1) / recipe.warmup_steps
        return min(1.0, warm_up, max(0.05, 2 * (recipe.steps - step) / recipe.steps)), 0.0
    left = recipe.steps + recipe.slip_steps - step
    return min(1.0, 2 * left / recipe.slip_steps), recipe.slips


def _optimizers(model: PreTrainedModel, recipe: Recipe) -> list[torch.optim.Optimizer]:
    matrices, wide, rest = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or "embed" in name or "lm_head" in name:
            rest.append(parameter)
        # Muon costs the square of the smaller side: too much for MLA's kv_b_proj.
        elif min(parameter.shape[-2:]) > 128:
            wide.append(parameter)
        else:
            matrices.append(parameter)
    optimizers = [Muon(matrices, lr=recipe.muon_lr), _adam(rest, recipe.adam_lr)]
    return optimizers + ([_adam(wide, recipe.wide_lr)] if wide else [])


def _adam(parameters: list[torch.nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)


def _step(optimizers: list[torch.optim.Optimizer], lr_scale: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = optimizer.defaults["lr"] * lr_scale
        optimizer.step()
        optimizer.zero_grad()


@contextmanager
def _threads(count: int):
    """A fixed number of threads: how sums are split changes their last bits. One, since two gain
    little on matrices this small, and lose much when the other core is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
