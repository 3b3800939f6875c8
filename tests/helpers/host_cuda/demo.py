"""Two steps of the demo, trainer and engine on one such GPU, in bfloat16. Settings go to the run.

    python -m host_cuda.demo placement.mode=colocated

The last line is the metrics of each step, as JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from lora_moe_rl.bench.gpu.stages import demo

# Triton's interpreter takes seconds for a batch, and vLLM tries the largest one first.
SETTINGS = [
    "algorithm.prompts_per_step=2", "algorithm.group_size=2", "rollout.max_response_tokens=4",
    "rollout.max_num_seqs=8", "model.max_length=64", "rollout.enforce_eager=true",
    'rollout.engine_args={"max_num_batched_tokens": 64, '
    '"kernel_config": {"enable_flashinfer_autotune": false}}',
]  # fmt: skip


def main(*more: str) -> list[dict[str, float]]:
    demo.STEPS = 2
    if "placement.mode=colocated" in more:  # else each has half of the GPU
        demo.SHARED = ["rollout.gpu_memory_utilization=0.3"]
    settings = [*demo.SETTINGS, "trainer.steps=2", *SETTINGS]
    with tempfile.TemporaryDirectory() as folder:
        demo.save_random(Path(folder))
        settings += [f"model={folder}", f"reward.function={demo.__file__}:digits"]
        return demo.steps("cuda", *settings, *more)


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])), flush=True)
