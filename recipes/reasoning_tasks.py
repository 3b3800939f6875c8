"""Tasks that reasoning-gym makes and scores, several at once; `pip install reasoning-gym` first.

    python recipes/reasoning_tasks.py model=Qwen/Qwen3-30B-A3B model.max_length=2048 \\
        rollout.max_response_tokens=1024
    python recipes/reasoning_tasks.py trainer.steps=2

The second is the tiny model, which reads no words: it shows that all of it works, and gets nothing
right. For a real one take layout and memory of its own recipe beside this one. Tasks, weights and
settings: `data.args.task`. Watch `reward/mean`. The names of tasks are in the library's gallery.
"""

import lora_moe_rl.recipe
from lora_moe_rl.config import (
    AdapterConfig,
    DataConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)

ASKED = "Think first. Then write your answer, and nothing else, as <answer>...</answer>."

config = RunConfig(
    name="reasoning_tasks",
    model=ModelConfig(max_length=512),
    adapter=AdapterConfig(rank=16, alpha=32),
    trainer=TrainerConfig(steps=100, world_size=2, ep=2, lr=1e-3, warmup_steps=2),
    rollout=RolloutConfig(max_response_tokens=64),
    data=DataConfig(
        generator="lora_moe_rl.data.generators:reasoning_gym",
        args={
            "task": {
                "chain_sum": {"weight": 2, "min_terms": 2, "max_terms": 3},
                "leg_counting": 1,
                "letter_counting": 1,
            }
        },
        chat_template=True,
        system_prompt=ASKED,
        too_long="drop",
    ),
    reward=RewardConfig(function="lora_moe_rl.rewards:reasoning_gym"),
)

if __name__ == "__main__":
    lora_moe_rl.recipe.main(config, __file__)
