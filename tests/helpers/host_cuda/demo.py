"""Two steps of the demo, trainer and engine on one such GPU, in bfloat16. Settings go to the run.

    python -m host_cuda.demo placement.mode=colocated

The last line is the metrics of each step, as JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import host_cuda
from lora_moe_rl.bench.gpu.stages import demo

SETTINGS = [
    "algorithm.prompts_per_step=2", "algorithm.group_size=2", "rollout.max_response_tokens=4",
    "model.max_length=64",
    *(f"rollout.{key}={json.dumps(value)}" for key, value in host_cuda.ROLLOUT.items()),
]  # fmt: skip


def main(*more: str) -> list[dict[str, float]]:
    demo.STEPS = 2
    if "placement.mode=colocated" in more:  # else each has half of the GPU
        demo.SHARED = []
    settings = [*demo.SETTINGS, "trainer.steps=2", *SETTINGS]
    with tempfile.TemporaryDirectory() as folder:
        demo.save_random(Path(folder))
        settings += [f"model={folder}", f"reward.function={demo.__file__}:digits"]
        return demo.steps("cuda", *settings, *more)


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])), flush=True)
