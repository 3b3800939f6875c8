"""The tiny Qwen3-MoE, taught to say what stands in front of a problem: a policy that can read.

python tests/integration/solution_reader.py DIR
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from lora_moe_rl.models.directory import resolve_model
from lora_moe_rl.tiny.arithmetic import problem
from lora_moe_rl.tiny.tokenizer import make_tokenizer, token_id


def drawn(rng: random.Random, shown: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """64 problems and where their answers are. With a number `shown` before the problem, that is
    what is said, right or wrong: "82;23+58=82"."""
    encode, sequences = make_tokenizer().encode, []
    for _ in range(64):
        prompt, answer = problem(rng)
        said = str(rng.randrange(199)) if shown else answer
        before = encode(f"{said};{prompt}" if shown else prompt)
        sequences.append((before, [*encode(said), token_id("<eos>")]))
    longest = max(len(before) + len(said) for before, said in sequences)
    ids = torch.full((64, longest), token_id("<pad>"))
    wanted = torch.zeros(64, longest, dtype=torch.bool)
    for row, (before, said) in enumerate(sequences):
        ids[row, : len(before) + len(said)] = torch.tensor([*before, *said])
        wanted[row, len(before) : len(before) + len(said)] = True
    return ids, wanted[:, 1:]


def learn_to_read(model, base, steps: int = 400) -> None:
    """A number before a problem is its answer; without one the model says what `base` would."""
    rng, optimizer = random.Random(7), torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1, (step + 1) / 20) * (1 - 0.9 * step / steps)
        ids, wanted = drawn(rng, shown=True)
        said = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
        reading = -said.gather(-1, ids[:, 1:, None])[..., 0][wanted].mean()
        ids, wanted = drawn(rng, shown=False)
        with torch.no_grad():
            before = base(input_ids=ids).logits[:, :-1].log_softmax(-1)[wanted]
        now = model(input_ids=ids).logits[:, :-1].log_softmax(-1)[wanted]
        kept = (before.exp() * (before - now)).sum(-1).mean()
        (reading + kept).backward()
        optimizer.step()
        optimizer.zero_grad()


def save_reader(folder: Path) -> None:
    """Some 70 s of two cores."""
    base, model = (
        AutoModelForCausalLM.from_pretrained(resolve_model("qwen3_moe"), dtype=torch.float32)
        for _ in range(2)
    )
    learn_to_read(model, base)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


if __name__ == "__main__":
    save_reader(Path(sys.argv[1]))
