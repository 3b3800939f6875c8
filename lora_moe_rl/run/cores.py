"""Which of a machine's cores a run computes on, where it has no GPU, and what would use the rest.

A rank computes on one core, and so does each thread of an engine's worker: a second one gains
nothing with small models. With lag 0 an update and a rollout take turns, and each may have all
cores; otherwise they share them. What the settings named here gain: docs/figures.md.
"""

from __future__ import annotations

from lora_moe_rl.config import RunConfig


def used(config: RunConfig, cores: int) -> str:
    """One clause, for `lora-moe-rl check`."""
    engine = config.rollout.ranks * config.rollout.cpu_threads
    update, rollout = config.trainer.world_size, config.num_engines * engine
    if not rollout:
        better = _ranks(config, cores)
        text = f"of {cores} cores an update computes on {min(update, cores)}"
    elif config.schedule.lag:
        better = _engines(config, (cores - update) // engine)
        text = f"of {cores} cores updates and rollouts compute on {min(update + rollout, cores)}"
    else:
        better = _ranks(config, cores) + _engines(config, cores // engine)
        text = (
            f"of {cores} cores an update computes on {min(update, cores)} and a rollout on "
            f"{min(rollout, cores)}"
        )
    return (f"{text} ({' '.join(better)} would use more)" if better else text) + _sequences(config)


def _ranks(config: RunConfig, cores: int) -> list[str]:
    """The largest data-parallel size that has a core for every rank, if it is larger."""
    trainer = config.trainer
    shared, experts = trainer.tp * trainer.cp, trainer.ep * trainer.etp
    model_parallel = shared * trainer.pp
    for dp in range(cores // model_parallel, trainer.dp, -1):
        if shared * dp % experts == 0:
            return [f"trainer.world_size={dp * model_parallel}"]
    return []


def _engines(config: RunConfig, most: int) -> list[str]:
    """No more than there are prompts in a step."""
    most = min(most, config.algorithm.prompts_per_step)
    return [f"rollout.engines={most}"] if most > config.num_engines else []


def _sequences(config: RunConfig) -> str:
    """Where an engine would have more of a step's samples at once than it may."""
    if not config.num_engines:
        return ""
    algorithm, most = config.algorithm, config.rollout.max_num_seqs
    samples = -(-algorithm.prompts_per_step // config.num_engines) * algorithm.group_size
    if samples <= most:
        return ""
    return (
        f"; engines take {most} of {samples} samples at once (rollout.max_num_seqs={samples}: all)"
    )
