"""Tokens that are selected over an optimizer step, on real Megatron-core ranks: loss, gradient and
what is told of the step against Hugging Face with PEFT's adapters, numpy's quantile of torch's own
entropies and covariances by hand, with micro-batches, masks and layouts."""

from __future__ import annotations

import linear_loss
import numpy as np
import peft_lora
import pytest
import tiny_families
import torch
from ranks import random_adapter, random_batch, run_ranks, spec_of

from lora_moe_rl.adapters.shards import assemble
from lora_moe_rl.config import RunConfig

RELATIVE = 1e-5
TEMPERATURE, QUANTILE, SHARE, COEF = 0.7, 0.3, 0.2, 0.4
CASES = {
    "top_entropy_quantile": {"top_entropy_quantile": QUANTILE},
    "kl_cov": {"loss": "kl_cov", "kl_cov_ratio": SHARE, "ppo_kl_coef": COEF, "anchor": "rollout"},
}
LAYOUTS = {
    "one rank": {},
    "dp2": {"world_size": 2},
    "tp2": {"world_size": 2, "tp": 2},
    "pp2": {"world_size": 2, "pp": 2},
    "ep2": {"world_size": 2, "ep": 2},
    "cp2": {"world_size": 2, "cp": 2},
}


def make_config(folder, case, mini_batches=1, **trainer) -> RunConfig:
    """Small micro-batches, so that every rank has several of uneven size."""
    return RunConfig(
        model=str(folder),
        adapter=peft_lora.ADAPTER,
        trainer={"micro_batch_tokens": 40, **trainer},
        rollout={"temperature": TEMPERATURE},
        replay={"mode": "off"},
        algorithm={"mini_batches": mini_batches, **CASES[case]},
    )


def batch_of(spec):
    """Of two samples tokens that are not in the loss; in two optimizer steps, if there are two."""
    batch, _ = random_batch(spec)
    batch.weights[2] = 0 * batch.weights[2]
    batch.weights[4][::2] = 0
    batch.mini_batch = np.arange(len(batch)) % 2
    return batch


def gradients(worker, spec):
    worker.set_adapter(random_adapter(spec))
    return worker.gradients(batch_of(spec))


def metrics_of(worker, spec):
    worker.set_adapter(random_adapter(spec))
    return worker.update(batch_of(spec)).metrics


class Theirs:
    """What Hugging Face's model says of the tokens in the loss, in the order of the samples."""

    def __init__(self, model, spec):
        self.model = peft_lora.wrap(model, spec)
        peft_lora.load(self.model, spec, random_adapter(spec))
        batch, found = batch_of(spec), []
        for i, weights in enumerate(batch.weights):
            inside = torch.from_numpy(weights > 0)
            ids = torch.from_numpy(batch.token_ids[i].astype(np.int64))
            logits = self.model(ids[None, :-1]).logits[0, -len(weights) :] / TEMPERATURE
            of = torch.distributions.Categorical(logits=logits)
            streams = of.log_prob(ids[-len(weights) :]), of.entropy()
            given = (torch.from_numpy(s[i]) for s in (batch.advantages, batch.logprobs))
            found.append([one[inside] for one in (*streams, *given)])
        self.logprobs, self.entropy, self.advantages, self.rollout = (
            torch.cat(each) for each in zip(*found, strict=True)
        )
        sizes = [len(one[0]) for one in found]
        self.mini_batch = np.repeat(batch.mini_batch, sizes)

    def loss(self, case: str) -> torch.Tensor:
        """The mean over all tokens in the loss, whether they are selected or not."""
        if case == "kl_cov":
            log_ratio = self.logprobs - self.rollout
            penalty = COEF * log_ratio.abs() * self.selected(case, slice(None))[0]
            return (penalty - log_ratio.exp() * self.advantages).mean()
        ratio = (self.logprobs - self.logprobs.detach()).exp()
        return -(ratio * self.advantages * self.selected(case, slice(None))[0]).mean()

    def selected(self, case: str, some) -> tuple[torch.Tensor, dict[str, float]]:
        """1.0 or 0.0 of each of these tokens, and what is told of them."""
        entropy, logprobs = (
            one.detach().numpy()[some].astype(np.float64) for one in (self.entropy, self.logprobs)
        )
        if case == "top_entropy_quantile":
            threshold = np.quantile(entropy, 1 - QUANTILE)
            told = {"entropy_threshold": threshold}
            return torch.from_numpy(entropy >= threshold).float(), told
        advantages = self.advantages.numpy()[some].astype(np.float64)
        added = (advantages - advantages.mean()) * (logprobs - logprobs.mean())
        least = np.sort(added)[-int(SHARE * len(added))]
        told = {"covariance_threshold": least, "covariance_largest": added.max()}
        told["covariance"] = np.cov(advantages, logprobs, ddof=0)[0, 1]
        return torch.from_numpy(added >= least).float(), told


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model = tiny_families.save("qwen3_moe", folder)
    spec = spec_of(folder, make_config(folder, "kl_cov"))
    return folder, spec, Theirs(model, spec)


SOME = ["one rank", "dp2", "tp2"]
EVERY = [pytest.param(n, marks=[] if n in SOME else [pytest.mark.slow]) for n in LAYOUTS]


@pytest.mark.parametrize("layout", EVERY)
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_hugging_face(theirs, case, layout):
    folder, spec, them = theirs
    them.model.zero_grad()
    loss = them.loss(case)
    loss.backward(retain_graph=True)
    wanted = peft_lora.views(them.model, spec, lambda parameter: parameter.grad)
    ranks = run_ranks(make_config(folder, case, **LAYOUTS[layout]), folder, gradients)
    ours = assemble(spec.tensor_shapes, [shard for _, _, shards in ranks for shard in shards])
    for found, _, _ in ranks:
        assert found == pytest.approx(loss.item(), rel=RELATIVE)
    difference, name = linear_loss.worst(ours, {n: g.numpy() for n, g in wanted.items()})
    assert difference < RELATIVE, name


@pytest.mark.parametrize("layout", EVERY)
@pytest.mark.parametrize("case", CASES)
def test_what_is_told_is_the_mean_over_optimizer_steps_that_select_by_themselves(
    theirs, case, layout
):
    folder, _, them = theirs
    ranks = run_ranks(make_config(folder, case, 2, **LAYOUTS[layout]), folder, metrics_of)
    each = [them.selected(case, them.mini_batch == step) for step in range(2)]
    tokens = torch.cat([selected for selected, _ in each])
    for metrics in ranks:
        assert metrics["loss/selected"] == pytest.approx(tokens.mean().item(), rel=RELATIVE)
        for name in each[0][1]:
            mean = np.mean([told[name] for _, told in each])
            assert metrics[f"loss/{name}"] == pytest.approx(mean, rel=RELATIVE)
        assert abs(np.diff([told[name] for _, told in each])[0]) > 0.01
