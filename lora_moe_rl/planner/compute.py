"""Floating-point operations of a token, and seconds of a step by a roofline.

Times are what the hardware would need at the efficiencies of `hardware.Efficiency`, which are
guesses and are printed with them: good for ranking layouts, not for promising a step time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lora_moe_rl import algorithms
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.teacher import SelfTeacherSettings
from lora_moe_rl.planner.activations import attended_widths
from lora_moe_rl.planner.base import base_tensors
from lora_moe_rl.planner.facts import Facts, Format
from lora_moe_rl.planner.formats import itemsize
from lora_moe_rl.planner.hardware import Efficiency, Gpu
from lora_moe_rl.planner.rollout import EngineRank
from lora_moe_rl.planner.trainer import (
    RankClass,
    in_flight,
    micro_batch_tokens,
    micro_batches,
    stage_layers,
)

# Of one decoded token: launches and the all-reduces of a layer that no bandwidth explains.
DECODE_LAYER_SECONDS = 60e-6


@dataclass(frozen=True)
class Lengths:
    """Mean tokens of a prompt and of a response that traffic and times are computed with."""

    prompt: int
    response: int

    @property
    def sample(self) -> int:
        return self.prompt + self.response


@dataclass(frozen=True)
class Flops:
    """What one token costs. `active`: base parameters that multiply it, without the embedding;
    `adapter`: those of the adapters. `full`: operations when every parameter is trained."""

    active: int
    adapter: int
    attention: float
    forward: float
    train: float
    full: float

    @property
    def adapter_share(self) -> float:
        """What the adapters add to a training step's operations."""
        return 6 * self.adapter / (self.train - 6 * self.adapter)


def flops(facts: Facts, spec: AdapterSpec, context: int, recompute: str) -> Flops:
    """At a mean context of half of `context` tokens (causal attention).

    Frozen weights have no gradient: a backward is one pass over the base and two over the adapters,
    against two and two when all is trained. Recomputation adds a forward.
    """
    shape = facts.shape
    active = 0
    for tensor in base_tensors(facts):
        if tensor.name.startswith("embedding") or len(tensor.shape) < 2:
            continue
        share = shape.top_k / shape.num_experts if tensor.part == "experts" else 1
        active += round(tensor.size * share)
    adapter = 0
    for site in spec:
        times = shape.top_k if site.num_experts is not None else 1
        adapter += times * site.rank * (site.in_features + site.out_features)
    attention = attention_of(facts) * context / 2
    forward = 2 * (active + adapter) + attention
    again = forward if recompute == "full" else 0.0
    train = forward + again + 2 * active + 4 * adapter + 2 * attention
    full_forward = 2 * active + attention
    full = 3 * full_forward + (full_forward if recompute == "full" else 0.0)
    return Flops(active, adapter, attention, forward, train, full)


def attention_of(facts: Facts) -> float:
    """Operations a token and token of context: scores and weighted values. Linear attention, which
    has some a token whatever its context, is left out."""
    d, layers = facts.shape.dims, facts.shape.num_layers - len(facts.shape.linear_layers)
    if facts.shape.family.attention == "mla":
        return 2.0 * layers * d["heads"] * (d["nope_dim"] + d["rope_dim"] + d["v_dim"])
    return 4.0 * layers * d["heads"] * d["head_dim"]


@dataclass(frozen=True)
class Seconds:
    """Seconds of one step, one stage after the other."""

    rollout: float
    train: float
    refit: float
    parts: dict[str, float]  # of rollout and train

    @property
    def step(self) -> float:
        return self.rollout + self.train + self.refit


class Roofline:
    """Times of steps of one model under any layout."""

    def __init__(self, facts: Facts, spec: AdapterSpec, lengths: Lengths, weights: Format):
        self.facts, self.spec, self.lengths = facts, spec, lengths
        self.b = itemsize(weights)
        self._flops: dict[str, Flops] = {
            how: flops(facts, spec, lengths.sample, how) for how in ("none", "full")
        }

    def of(self, recompute: str) -> Flops:
        return self._flops[recompute]

    def seconds(
        self,
        config: RunConfig,
        heaviest: RankClass,
        engine: EngineRank | None,
        refit: float,
        hardware: tuple[Gpu, int, Efficiency],
    ) -> Seconds:
        """`hardware`: the GPU, how many share a node, and the efficiencies."""
        train = self._train(config, heaviest, *hardware)
        rollout = {} if engine is None else self.rollout(config, engine, *hardware)
        return Seconds(sum(rollout.values()), sum(train.values()), refit, rollout | train)

    def _train(
        self,
        config: RunConfig,
        heaviest: RankClass,
        gpu: Gpu,
        per_node: int,
        efficiency: Efficiency,
    ) -> dict[str, float]:
        trainer, shape, algorithm = config.trainer, self.facts.shape, config.algorithm
        work = self.of(trainer.recompute)
        tokens = algorithm.prompts_per_step * algorithm.group_size * self.lengths.sample
        per_token = algorithm.epochs * work.train
        wanted = algorithms.passes(config)
        if "old" in wanted:
            per_token += work.forward
        if "reference" in wanted:
            of_base = 2 * work.active + work.attention
            per_token += work.forward if algorithms.make(config).from_start else of_base
        if "values" in wanted:
            per_token += work.forward + algorithm.epochs * work.train
        compute = tokens * per_token / (trainer.world_size * gpu.flops * efficiency.train_flops)
        stages = [len(layers) for layers in stage_layers(trainer, shape.num_layers)]
        uneven = max(stages) * trainer.pp / shape.num_layers
        steps = algorithm.mini_batches * algorithm.epochs * (2 if "values" in wanted else 1)
        count = micro_batches(config, self.lengths.sample)
        bubble = compute * uneven * (trainer.pp - 1) / (count * trainer.vpp)
        volume = self._volume(config, max(stages), per_node)
        passes = steps * count
        fast = passes * volume["fast"] / (gpu.fast_link * efficiency.links)
        slow = passes * volume["slow"] / (gpu.link * efficiency.links)
        copied = 0.0
        if trainer.offloads_activations:
            kept = heaviest.host_in_step / in_flight(
                trainer, heaviest.stages[0], micro_batches(config)
            )
            one_way = passes * kept / (gpu.host_link * efficiency.links)
            trained = compute * uneven * algorithm.epochs * work.train / per_token
            copied = _not_hidden(one_way, trained)
        summed = 4 * heaviest.trained_parameters * 2 if trainer.stage_ranks > 1 else 0
        return {
            "compute": compute * uneven,
            "pipeline bubble": bubble,
            "communication": fast + slow,
            **({"copies to the host": copied} if trainer.offloads_activations else {}),
            "gradient sums": steps * summed / (gpu.link * efficiency.links),
        }

    def _volume(self, config: RunConfig, layers: int, per_node: int) -> dict[str, float]:
        """Bytes of one micro-batch that a rank sends inside its node and beyond."""
        trainer, shape = config.trainer, self.facts.shape
        tokens, hidden = micro_batch_tokens(config) / trainer.cp, shape.hidden_size
        passes = 3 if trainer.recompute == "full" else 2  # forward, backward, and the forward again
        tp, ep = trainer.tp, trainer.ep * trainer.etp
        # A gather and a scatter before and behind attention, and again for the MLP.
        gathered = 4 * tokens * hidden * self.b * (tp - 1) / tp * layers * passes
        # To the experts and back.
        exchanged = 2 * tokens / tp * shape.top_k * hidden * self.b * layers * passes
        exchanged *= (ep - 1) / ep
        # Queries, keys and values to the ranks that have their heads, and what they give back.
        query, key = attended_widths(shape, trainer)
        shared = 2 * tokens * (query + key) / tp * self.b * (trainer.cp - 1) / trainer.cp
        shared *= layers * passes
        outside = max(0.0, 1 - per_node / ep)
        staged = 2 * tokens / tp * hidden * self.b if trainer.pp > 1 else 0
        inside, near = tp <= per_node, tp * trainer.cp <= per_node
        return {
            "fast": exchanged * (1 - outside) + gathered * inside + shared * near,
            "slow": exchanged * outside + staged + gathered * (not inside) + shared * (not near),
        }

    def rollout(
        self, config: RunConfig, engine: EngineRank, gpu: Gpu, per_node: int, efficiency: Efficiency
    ) -> dict[str, float]:
        """Seconds of a data-parallel rank, which share the work: prefill of every prompt, then
        decoding in waves of as many sequences as fit; and `scoring` where the policy is its own
        teacher, which reads every sample once more."""
        rollout, algorithm = config.rollout, config.algorithm
        prompts = math.ceil(algorithm.prompts_per_step / (rollout.engines * rollout.dp))
        samples = prompts * (algorithm.group_size + algorithms.make(config).greedy_baseline)
        context = self.lengths.prompt + self.lengths.response // 2
        fit = max(1, max(0, engine.kv_cache) // (engine.kv_token * context))
        batch = max(1, min(samples, rollout.max_num_seqs, fit))
        waves = samples / batch
        work, speed = self.of("none"), gpu.flops * efficiency.prefill_flops * rollout.tp
        shape = self.facts.shape
        chosen = shape.top_k / shape.num_experts if shape.num_experts else 1.0
        untouched = (1 - chosen) ** (batch * rollout.dp)
        slot = engine.slots / max(1, config.refit.slots)
        read = (engine.weights + slot) * (1 - untouched) + batch * context * engine.kv_token
        token = max(
            read / (gpu.bandwidth * efficiency.decode_bandwidth),
            batch * work.forward / speed,
        )
        token += shape.num_layers * DECODE_LAYER_SECONDS
        prefilled = (prompts if rollout.prefix_caching else samples) * self.lengths.prompt
        there = rollout.ranks // rollout.nodes
        link = gpu.fast_link if rollout.nodes == 1 and there <= per_node else gpu.link
        # Each data-parallel rank gathers the tokens of all, and gives back what is of others.
        met = 2 * shape.hidden_size * len(shape.moe_layers) * self.b * (rollout.dp - 1)
        met /= link * efficiency.links
        once = work.forward / speed + met
        read_again = samples * self._read_by_teacher(config)
        return {
            "prefill": prefilled * once,
            "decode": waves * self.lengths.response * (token + batch * met),
            **({"scoring": read_again * once} if read_again else {}),
        }

    def _read_by_teacher(self, config: RunConfig) -> int:
        """Tokens of a sample that the engines score once more behind a prompt with a solution, at
        most; 0 where nobody does. Feedback is as long as it is, and left out."""
        teacher = algorithms.make(config).teacher
        if not isinstance(teacher, SelfTeacherSettings):
            return 0
        shown = 0 if teacher.success_reward is None else self.lengths.response
        return self.lengths.sample + shown


def _not_hidden(one_way: float, trained: float) -> float:
    """Seconds that copies to the host take beyond the forward, a third of `trained`, and copies
    back beyond the backward."""
    return max(0.0, one_way - trained / 3) + max(0.0, one_way - trained * 2 / 3)
