"""The same step in TRL and PEFT: one process, generation by transformers, on the CPU.

A script of its own, that needs trl, peft, datasets, torch and transformers and nothing of ours:

    python trl_step.py '{"model": DIR, "data": JSONL, "experts": true, ...}'

It prints one line of JSON: versions, seconds of each measured step, response tokens a sample.
`lora_moe_rl/bench/step.py` runs it, by whichever interpreter has TRL.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import tempfile
import time
from importlib.metadata import version

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def reward(completion_ids: list[list[int]], **_) -> list[float]:
    """The share of even token ids: cheap, and different between samples. Ours and TRL's."""
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]


def main(work: dict) -> dict:
    import trl  # noqa: F401  says at once that it is not there
    import torch  # isort: skip

    torch.set_num_threads(work["threads"])
    steps, clock = work["warmup"] + work["steps"], _clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(work, steps, folder, clock)
        trainer.train()
    logged = [e for e in trainer.state.log_history if "completions/mean_length" in e]
    ends = clock.ends
    return {
        "versions": {name: version(name) for name in ("trl", "peft", "torch", "transformers")},
        "seconds": [b - a for a, b in itertools.pairwise(ends)][-work["steps"] :],
        "response_tokens": sorted({float(e["completions/mean_length"]) for e in logged}),
        "trainable": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
    }


def _clock():
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        """When training began, and when each step ended."""

        def __init__(self):
            self.ends: list[float] = []

        def on_train_begin(self, *args, **kwargs):
            self.ends.append(time.perf_counter())

        def on_step_end(self, *args, **kwargs):
            self.ends.append(time.perf_counter())

    return Clock()


def _trainer(work: dict, steps: int, folder: str, clock):
    from datasets import load_dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=work["prompts"] * work["group"],
        num_generations=work["group"],
        max_completion_length=work["tokens"],
        generation_kwargs={"min_new_tokens": work["tokens"]},
        max_steps=steps,
        learning_rate=work["lr"],
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        beta=0.0,  # no reference policy
        router_aux_loss_coef=0.0,  # no load-balancing loss: ours has none
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    lora = LoraConfig(
        r=work["rank"],
        lora_alpha=work["alpha"],
        target_modules=ATTENTION,
        target_parameters=EXPERTS if work["experts"] else None,
        task_type="CAUSAL_LM",
    )
    return GRPOTrainer(
        model=work["model"],
        reward_funcs=reward,
        args=config,
        train_dataset=load_dataset("json", data_files=work["data"], split="train"),
        peft_config=lora,
        callbacks=[clock],
    )


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        result = main(json.loads(sys.argv[1]))
    print(json.dumps(result))
