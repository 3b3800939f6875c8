"""Writes what TRL's SDPOTrainer makes of made-up groups to a file: what a teacher reads of each
sample, and the loss of sampled tokens with its gradient.

    make oracles         # tests/unit/rewards/sdpo_oracle.json

Run in an environment of its own, as record.py. The loss in float64.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import trl
from trl.experimental.sdpo import SDPOConfig
from trl.experimental.sdpo.sdpo_trainer import (
    DistillationLogits,
    SDPOTrainer,
    SuccessfulRolloutTeacherContextBuilder,
)

SAMPLES, LONGEST, PAD = 4, 5, 0
# Token ids are characters here, so that decoded texts can be told apart.
RESPONSES = (
    ("81", "<think>\nhm\n</think>\n82", "{83}", "84"),
    ("a", "b", "c", "d"),
    ("e", "f", "g", "h"),
    ("i", "j", "k", "l"),
)
REWARDS = ((0.0, 1.0, 0.5, 1.0), (1.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.5, 0.0), (1.0, 1.0, 1.0, 1.0))
PROMPTS: tuple[Any, ...] = (
    "23+58=",
    [{"role": "system", "content": "Add."}, {"role": "user", "content": "What is {x}?"}],
    "third",
    [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ],
)
FEEDBACKS = (None, "wrong {format}", " ", "too long")  # a sample of each prompt
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "lower": {"success_reward_threshold": 0.5},
    "feedback": {"include_environment_feedback": True},
    "feedback alone": {
        "include_environment_feedback": True,
        "use_successful_as_teacher": False,
    },
    "without thinking": {"remove_thinking_from_demonstration": True},
    "own templates": {
        "reprompt_template": "{solution}{prompt}|{feedback}",
        "solution_template": "<{successful_previous_attempt}>",
        "feedback_template": "[{feedback_raw}]",
        "include_environment_feedback": True,
    },
}


def readings(options: dict[str, Any]) -> list[Any]:
    """What the teacher reads of every sample, null where that is the prompt as it is."""
    seen: list[Any] = []

    def tokenized(messages: list[Any]) -> list[list[int]]:
        seen.extend(messages)
        return [[1]] * len(messages)

    fields = SDPOConfig.__dataclass_fields__
    args = SimpleNamespace(**{name: field.default for name, field in fields.items()} | options)
    texts = [text for group in RESPONSES for text in group]
    width = max(map(len, texts))
    ids = torch.tensor([[ord(c) for c in text] + [PAD] * (width - len(text)) for text in texts])
    trainer = SimpleNamespace(
        args=args,
        accelerator=SimpleNamespace(
            device="cpu",
            process_index=0,
            gather=lambda one: one,
            pad_across_processes=lambda one, **_: one,
        ),
        model=SimpleNamespace(training=True),
        num_generations=SAMPLES,
        _tokenizer=SimpleNamespace(pad_token_id=PAD),
        processing_class=SimpleNamespace(
            decode=lambda ids, **_: "".join(chr(i) for i in ids.tolist())
        ),
        _tokenize_prompts_untruncated=tokenized,
    )
    builder = SuccessfulRolloutTeacherContextBuilder(trainer)
    found = builder.build(
        {"completion_ids": ids, "completion_mask": (ids != PAD).long()},
        [prompt for prompt in PROMPTS for _ in range(SAMPLES)],
        torch.tensor(REWARDS).reshape(-1),
        [feedback for feedback in FEEDBACKS for _ in range(SAMPLES)],
    )
    taught = found["self_distillation_mask"].bool().tolist()
    return [text if one else None for text, one in zip(seen, taught, strict=True)]


def loss_of(seed: int, clip: float, moved: float) -> dict[str, Any]:
    """Of one batch, some samples of which are not taught. Of two tokens to choose from the first is
    the sampled one. `moved`: how far the student is from who sampled."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, LONGEST + 1, 6)
    mask = np.arange(LONGEST) < lengths[:, None]
    student = np.log(rng.uniform(0.05, 0.95, mask.shape))
    teacher = np.log(rng.uniform(0.05, 0.95, mask.shape))
    old = np.minimum(student + rng.normal(0, moved, mask.shape), -1e-3)
    taught = np.array([True, True, False, True, False, True])

    def logits(values: torch.Tensor) -> torch.Tensor:
        return torch.stack([values, torch.log1p(-values.exp())], dim=-1)

    own = torch.tensor(student).requires_grad_()
    given = DistillationLogits(
        completion_ids=torch.zeros(mask.shape, dtype=torch.long),
        completion_mask=torch.tensor(mask),
        loss_mask=torch.tensor(mask & taught[:, None], dtype=torch.float64),
        student_logits=logits(own),
        teacher_logits=logits(torch.tensor(teacher)),
    )
    trainer = SimpleNamespace(
        args=SimpleNamespace(
            distillation_mode="sampled_token", distillation_alpha=1.0, distillation_is_clip=clip
        ),
        accelerator=SimpleNamespace(gather=lambda one: one),
        _log_self_distillation_metric=lambda *_: None,
    )
    inputs = {"old_per_token_logps": torch.tensor(old)}
    model = SimpleNamespace(training=True)
    loss = SDPOTrainer._compute_self_distillation_loss(trainer, model, inputs, given)
    loss.backward()
    assert own.grad is not None
    named = {"mask": mask, "student": student, "teacher": teacher, "old": old, "taught": taught}
    return {
        **{name: value.tolist() for name, value in named.items()},
        "clip": clip,
        "loss": loss.item(),
        "gradient": own.grad.tolist(),
    }


def main(out: Path) -> None:
    found = {
        "version": trl.__version__,
        "prompts": PROMPTS,
        "responses": RESPONSES,
        "rewards": REWARDS,
        "feedbacks": FEEDBACKS,
        "readings": {name: readings(options) for name, options in VARIANTS.items()},
        "losses": [loss_of(*one) for one in ((0, 2.0, 0.0), (1, 1.2, 0.6), (2, 1e9, 0.6))],
    }
    out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{out}: {out.stat().st_size / 1e3:.0f} kB, from TRL {trl.__version__}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
