"""Models of a training service on real ranks: against PEFT and torch, and against each other."""

from __future__ import annotations

import linear_loss
import numpy as np
import peft_lora
import pytest
import tiny_families
import torch
from ranks import random_adapter, run_ranks, spec_of

from lora_moe_rl.adapters.shards import assemble
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import ServiceError
from lora_moe_rl.models.directory import resolve_model
from lora_moe_rl.service.backend import Datum, LossCall
from lora_moe_rl.service.batches import batch_of, logprobs_of

RELATIVE = 1e-5
CALLS = (
    LossCall("cross_entropy"),
    LossCall("importance_sampling"),
    LossCall("ppo", {"clip_high_threshold": 1.05, "clip_low_threshold": 0.95}),
    LossCall("cispo", {"clip_low_threshold": 0.5, "clip_high_threshold": 1.1}),
    LossCall("dro", {"beta": 0.3}),
    LossCall("gspo", {"clip_low_threshold": 0.98, "clip_high_threshold": 1.02}),
)
# lr, betas, eps, weight decay, clip: twice, as a client may ask.
STEPS = ((0.002, (0.9, 0.95), 1e-8, 0.0, 0.0), (0.001, (0.8, 0.99), 1e-4, 0.1, 0.05))


def data_of(vocab_size: int, call: LossCall, before=None, seed: int = 5) -> list[Datum]:
    """Targets are not always the tokens that follow. `before`: logprobs to have sampled around."""
    rng, found = np.random.default_rng(seed), []
    for number, ids in enumerate(linear_loss.sequences(vocab_size)):
        targets = np.append(ids[1:], 3).astype(np.int32)
        targets[: len(ids) // 3] = 0
        noise = rng.normal(0, 0.1, len(ids)).astype(np.float32)
        inputs = {"weights": rng.normal(0, 1, len(ids)).astype(np.float32)}
        if call.name != "cross_entropy":
            inputs = {
                "advantages": inputs["weights"],
                "logprobs": noise + (-6 if before is None else before[number]),
            }
        if call.name == "gspo":
            marks = (np.arange(len(ids)) % 4 > 0).astype(np.float32)
            marks[-1] = 0.5  # what is not 0 is marked
            inputs["sequence_ratio_mask"] = marks
        found.append(Datum(ids.astype(np.int32), targets, inputs))
    return found


def widened(data: list[Datum], vocab_size: int) -> list[Datum]:
    """With up to three targets at each place, of which one may be there twice; every third datum
    has one, and no second dimension."""
    rng, found = np.random.default_rng(9), []
    for number, one in enumerate(data):
        if number % 3:
            shape = len(one.tokens), 1 + number % 3
            targets = rng.integers(0, vocab_size, shape).astype(np.int32)
            targets[:2] = one.targets[:2, None]
            weights = rng.normal(0, 1, shape).astype(np.float32)
            one = Datum(one.tokens, targets, {"weights": weights})
        found.append(one)
    return found


def life(worker, spec, calls_and_data, steps):
    """Of each call: (logprobs, loss, gradient); after each step the adapter and its metrics."""
    ranks = {site.name: site.rank for site in spec}
    worker.of_models("create", "a", 3, ranks, 1.0)
    worker.set_adapter(random_adapter(spec))
    engine, passes, after = worker.engine, [], []
    for call, data in calls_and_data:
        batch = batch_of(data, call, 1)
        worker.models.of["a"].gradient = None
        found = worker.of_models("forward", "a", call.name, call.settings, True, batch, ())
        engine.adapters.gradients.whole.copy_(worker.models.of["a"].gradient)
        passes.append((*found, engine.adapters.export(of=lambda parameter: parameter.grad)))
    call, data = calls_and_data[0]
    worker.models.of["a"].gradient = None
    for lr, *how in steps:
        for part in (data[:3], data[3:]):  # whose gradients add up
            batch = batch_of(part, call, 2)
            worker.of_models("forward", "a", call.name, call.settings, True, batch, ())
        engine.adapters.gradients.whole.copy_(worker.models.of["a"].gradient)
        gradient = engine.adapters.export(of=lambda parameter: parameter.grad)
        metrics = worker.of_models("step", "a", lr, *how)
        after.append((gradient, engine.adapters.export(), metrics))
    with pytest.raises(ServiceError, match="no gradient: call forward_backward"):
        worker.of_models("step", "a", lr, *how)
    return passes, after


def by_hand(call: LossCall, logprobs: torch.Tensor, datum: Datum) -> torch.Tensor:
    """The formulas of Tinker's documentation, once more."""
    inputs = {key: torch.from_numpy(value) for key, value in datum.inputs.items()}
    if call.name == "cross_entropy":
        return (-logprobs * inputs["weights"]).sum()
    ratio, advantages = torch.exp(logprobs - inputs["logprobs"]), inputs["advantages"]
    low, high = (call.settings.get(f"clip_{side}_threshold") for side in ("low", "high"))
    if call.name == "importance_sampling":
        return -(ratio * advantages).sum()
    if call.name == "ppo":
        clipped = torch.clamp(ratio, low, high)
        return -torch.min(ratio * advantages, clipped * advantages).sum()
    if call.name == "cispo":
        return -(torch.clamp(ratio, low, high).detach() * logprobs * advantages).sum()
    if call.name == "gspo":
        marked = inputs["sequence_ratio_mask"] != 0
        mean = (logprobs.detach() - inputs["logprobs"])[marked].mean()
        ratio = torch.exp(mean + logprobs - logprobs.detach())
        clipped = torch.clamp(ratio, low, high)
        return -torch.min(ratio * advantages, clipped * advantages).sum()
    quadratic = (logprobs - inputs["logprobs"]) ** 2
    return -(logprobs * advantages - 0.5 * call.settings["beta"] * quadratic).sum()


def their_logprobs(model, data) -> list[torch.Tensor]:
    found = []
    for datum in data:
        logits = model(torch.from_numpy(datum.tokens).long()[None]).logits[0].float()
        every = torch.log_softmax(logits, -1)
        targets = torch.from_numpy(datum.targets).long()
        found.append(every.gather(1, targets.view(len(targets), -1)).view(targets.shape))
    return found


def their_pass(model, spec, call, data):
    """(logprobs, loss, gradients by canonical name) of PEFT's model."""
    model.zero_grad(set_to_none=False)
    logprobs = their_logprobs(model, data)
    loss = sum(by_hand(call, one, datum) for one, datum in zip(logprobs, data, strict=True))
    loss.backward()
    gradients = peft_lora.views(model, spec, lambda p: p.grad)
    return [one.detach().numpy() for one in logprobs], loss.item(), gradients


def test_a_model_learns_as_pefts_does_under_torchs_adam(tmp_path):
    model = tiny_families.save("qwen3_moe", tmp_path)
    config = RunConfig(model=str(tmp_path), adapter=peft_lora.ADAPTER)
    spec = spec_of(tmp_path, config)
    theirs = peft_lora.wrap(model, spec)
    peft_lora.load(theirs, spec, random_adapter(spec))
    vocab = spec.shape.vocab_size
    plain = data_of(vocab, CALLS[0])
    with torch.no_grad():
        before = [one.numpy() for one in their_logprobs(theirs, plain)]
    calls = [(call, data_of(vocab, call, before)) for call in CALLS]
    calls.append((CALLS[0], widened(plain, vocab)))

    ((passes, after),) = run_ranks(config, tmp_path, life, calls, STEPS)

    for (call, data), (logprobs, metrics, gradient) in zip(calls, passes, strict=True):
        expected, loss, gradients = their_pass(theirs, spec, call, data)
        ours = logprobs_of(data, [logprobs[number] for number in range(len(data))])
        for one, other in zip(ours, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=2e-5)
        assert metrics["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-5), call
        ours = assemble(spec.tensor_shapes, gradient)
        names = {name: value.numpy() for name, value in gradients.items()}
        difference, name = linear_loss.worst(ours, names)
        assert difference < RELATIVE, (call, name)

    leaves = {n: torch.tensor(v, requires_grad=True) for n, v in random_adapter(spec).items()}
    adam = torch.optim.AdamW(leaves.values())
    for (lr, betas, eps, decay, clip), (gradient, shards, metrics) in zip(
        STEPS, after, strict=True
    ):
        ours = assemble(spec.tensor_shapes, gradient)
        *_, gradients = their_pass(theirs, spec, *calls[0])
        difference, name = linear_loss.worst(ours, {n: v.numpy() for n, v in gradients.items()})
        assert difference < 2 * RELATIVE, name  # of an adapter that has had a step
        for name, leaf in leaves.items():
            leaf.grad = torch.from_numpy(ours[name])
        norm = torch.nn.utils.clip_grad_norm_(leaves.values(), clip or float("inf"))
        assert norm.item() > clip, "nothing is clipped"
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
        adam.param_groups[0].update(lr=lr, betas=betas, eps=eps, weight_decay=decay)
        adam.step()
        values = {name: leaf.detach().numpy() for name, leaf in leaves.items()}
        difference, name = linear_loss.worst(assemble(spec.tensor_shapes, shards), values)
        assert difference < 1e-6, name
        peft_lora.load(theirs, spec, values)


MODEL = "qwen3_moe"


def config_of(rank: int = 8, **trainer) -> RunConfig:
    adapter = {"rank": rank, "expert_rank": rank // 2}
    return RunConfig(model=MODEL, adapter=adapter, trainer={"micro_batch_tokens": 24, **trainer})


def two_models(worker, spec, turns, data, ranks_of, factors):
    """What each turn of a model finds: logprobs and loss of its forward, and the adapter after its
    step; as last each adapter."""
    found = []
    for name in ranks_of:
        worker.of_models("create", name, 7, ranks_of[name], factors[name])
    for number, name in enumerate(turns):
        call = CALLS[0]
        for part in (data[:3], data[3:]):
            batch = batch_of(part, call, number)
            logprobs, metrics = worker.of_models("forward", name, call.name, {}, True, batch, ())
            found.append((name, logprobs, metrics["loss"]))
        if number % 3 == 2:  # another's forward comes between a model's and its step
            other = next(one for one in ranks_of if one != name) if len(ranks_of) > 1 else name
            batch = batch_of(data, call, number)
            worker.of_models("forward", other, call.name, {}, False, batch, ())
        worker.of_models("step", name, 0.01, (0.9, 0.95), 1e-2, 0.01, 1.0)
    adapters = {}
    for name in ranks_of:
        worker.of_models("select", name)
        adapters[name] = worker.export()
    return found, adapters


TURNS = ("a", "b", "a", "b", "b", "a")


def of_two(config, turns=TURNS, names=("a", "b")):
    """By name: what its turns found, in order, and its adapter in the end; b has half the rank."""
    model_dir = resolve_model(MODEL)
    spec = spec_of(model_dir, config)
    whole = config.adapter.rank == 8
    half = {site.name: site.rank // (2 if whole else 1) for site in spec}
    ranks = {"a": {site.name: site.rank for site in spec}, "b": half}
    factors = {"a": 1.0, "b": 2.0 if whole else 1.0}
    data = data_of(spec.shape.vocab_size, CALLS[0])
    data[3:] = widened(data[3:], spec.shape.vocab_size)
    mine = [turn for turn in turns if turn in names]
    args = mine, data, {n: ranks[n] for n in names}, {n: factors[n] for n in names}
    by_rank = run_ranks(config, model_dir, two_models, *args)
    found = {name: [] for name in names}
    for of_pass in zip(*(passes for passes, _ in by_rank), strict=True):
        logprobs: dict = {}
        for _, mine, _ in of_pass:
            logprobs |= mine
        name, _, loss = of_pass[0]
        found[name].append(([logprobs[i] for i in range(len(logprobs))], loss))
    tensors = {
        name: assemble(spec.tensor_shapes, [s for _, one in by_rank for s in one[name]])
        for name in names
    }
    return found, tensors


@pytest.fixture(scope="module")
def together():
    return of_two(config_of())


def close(found, expected, rtol):
    for (ours, loss), (theirs, of_theirs) in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(one, other, rtol=rtol, atol=rtol)
        assert loss == pytest.approx(of_theirs, rel=rtol, abs=rtol)


@pytest.mark.parametrize("name", ["a", "b"])
def test_models_do_not_disturb_each_other(together, name):
    """Bit for bit what a service with this one alone finds."""
    found, tensors = of_two(config_of(), names=(name,))
    close(together[0][name], found[name], 0)
    for key, value in tensors[name].items():
        np.testing.assert_array_equal(together[1][name][key], value)


def test_a_model_of_a_lower_rank_is_that_of_a_service_of_that_rank(together):
    found, tensors = of_two(config_of(4), names=("b",))
    close(together[0]["b"], found["b"], RELATIVE)
    for key, value in tensors["b"].items():
        ours = together[1]["b"][key]
        np.testing.assert_allclose(ours[tuple(map(slice, value.shape))], value, atol=1e-5, rtol=0)
        assert np.abs(ours).sum() == pytest.approx(np.abs(value).sum(), rel=1e-4), (
            "zeros have moved"
        )


LAYOUTS = {"tp2": {"tp": 2}, "dp2_ep2": {"ep": 2}, "pp2": {"pp": 2}, "cp2": {"cp": 2}}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_find_what_one_rank_does(together, layout):
    found, tensors = of_two(config_of(world_size=2, **layout))
    for name in ("a", "b"):  # after three steps of each
        close(found[name], together[0][name], 2 * RELATIVE)
        difference, key = linear_loss.worst(tensors[name], together[1][name])
        assert difference < 2 * RELATIVE, key
