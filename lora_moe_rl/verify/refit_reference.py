"""What Hugging Face says of an adapter, and on which sequences: those that rounding changes least.

Sequences are sampled from the merged model: to a trained one most others are so unlikely that their
logits are large, and the last bit of a float32 of 20 is 2e-6. Of several times as many as are
wanted, those are kept whose logprobs change least when every linear's output is changed in its last
bit, in the merged model and in the base, and that the adapter changes enough.
A fault has the size of what the adapter adds, which all of these show.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.errors import RefitError
from lora_moe_rl.verify import hf

Tensors = dict[str, np.ndarray]
LENGTHS = (6, 17)  # of a sequence, the second excluded
CANDIDATES = 16  # sampled for each that is wanted
TRIALS = 3  # of rounding, in each of the two models
LAST_BIT = 2.0**-23


@dataclass
class Reference:
    """`merged` and `base`: logprobs `[L - 1]` of each sequence, with the adapter merged into the
    weights by hand and without; `exact` float64, in which the forward of the merged weights is
    computed once more, or None where memory is too small for it. `noise`: largest change of one by
    another last bit."""

    sequences: list[list[int]]
    merged: list[np.ndarray]
    base: list[np.ndarray]
    exact: list[np.ndarray] | None
    noise: float


def reference(
    rank: int,
    model_dir: Path,
    spec: AdapterSpec,
    tensors: Tensors,
    count: int,
    seed: int,
    least_effect: float,
) -> Reference:
    """A process's job. `least_effect`: what the adapter must change of a sequence. Raises
    RefitError when it changes none so much."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(*LENGTHS, (CANDIDATES * count,), generator=generator)
    model = hf.load(model_dir)
    hf.merge(model, spec, tensors)
    ids = _sample(model, len(lengths), generator)
    merged, noise = _scores(model, ids, generator)
    del model
    model = hf.load(model_dir)
    base, base_noise = _scores(model, ids, generator)
    kept = choose(merged - base, np.maximum(noise, base_noise), lengths.numpy(), least_effect)
    if not kept:
        raise RefitError(
            f"the adapter changes no sequence's logprobs by {least_effect:g}: nothing to compare"
        )
    sequences = [ids[i, : lengths[i]].tolist() for i in kept[:count]]
    base_scores = [hf.logprobs(model, sequence) for sequence in sequences]
    hf.merge(model, spec, tensors)
    merged_scores = [hf.logprobs(model, sequence) for sequence in sequences]
    del model
    worst = max(
        float(np.maximum(noise, base_noise)[i, : lengths[i] - 1].max()) for i in kept[:count]
    )
    model = hf.load_exact(model_dir, spec, tensors)
    exact = None if model is None else hf.exact_logprobs(model, sequences)
    return Reference(sequences, merged_scores, base_scores, exact, worst)


def choose(
    effect: np.ndarray, noise: np.ndarray, lengths: np.ndarray, least_effect: float
) -> list[int]:
    """Sequences that the adapter changes by at least so much, those with the least noise first.
    `effect` and `noise` `[n, L - 1]` of logprobs, of which a sequence takes its length less one."""
    of_sequence = [
        (noise[i, : length - 1].max(), i)
        for i, length in enumerate(lengths)
        if np.abs(effect[i, : length - 1]).max() >= least_effect
    ]
    return [i for _, i in sorted(of_sequence)]


@torch.no_grad()
def _sample(model: torch.nn.Module, count: int, generator: torch.Generator) -> torch.Tensor:
    """Sequences `[count, L]` that begin with a random token."""
    ids = torch.randint(model.config.vocab_size, (count, 1), generator=generator)
    while ids.shape[1] < LENGTHS[1] - 1:
        chances = model(ids).logits[:, -1].float().softmax(-1)
        ids = torch.cat([ids, torch.multinomial(chances, 1, generator=generator)], dim=1)
    return ids


def _scores(
    model: torch.nn.Module, ids: torch.Tensor, generator: torch.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Logprobs `[n, L - 1]`, and how much other last bits change them."""
    scores = _logprobs(model, ids)
    noise = np.zeros_like(scores)
    for _ in range(TRIALS):
        with other_last_bits(model, generator):
            noise = np.maximum(noise, np.abs(_logprobs(model, ids) - scores))
    return scores, noise


@torch.no_grad()
def _logprobs(model: torch.nn.Module, ids: torch.Tensor) -> np.ndarray:
    scores = torch.log_softmax(model(ids).logits[:, :-1].float(), dim=-1)
    return scores.gather(2, ids[:, 1:, None])[:, :, 0].numpy()


@contextmanager
def other_last_bits(model: torch.nn.Module, generator: torch.Generator) -> Iterator[None]:
    """A context in which what linears, norms and layers return is changed by up to a unit in the
    last place of a float32."""

    def change(module, args, output):
        hidden = output[0] if isinstance(output, tuple) else output
        if not hidden.is_floating_point():
            return output
        noise = torch.rand(hidden.shape, generator=generator) * 2 - 1
        hidden = hidden * (1 + LAST_BIT * noise)
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    inner = [*model.model.layers, *(m for m in model.model.modules() if _computes(m))]
    handles = [module.register_forward_hook(change) for module in inner]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _computes(module: torch.nn.Module) -> bool:
    name = type(module).__name__
    return isinstance(module, torch.nn.Linear) or name.endswith(("Norm", "Experts"))
