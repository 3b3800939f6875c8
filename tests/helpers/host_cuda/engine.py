"""An engine of vLLM's CUDA build, as a run starts it, beside Hugging Face's model in float32.

    python -m host_cuda.engine qwen3_moe float32

The last line is the largest difference of a logprob, of the base and with a published adapter, and
the largest that the adapter makes.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import host_cuda
from lora_moe_rl.bench.gpu.stages.engine import Bench
from lora_moe_rl.bench.model import save_tiny
from lora_moe_rl.rollout.engine import RolloutEngine
from lora_moe_rl.verify.comparisons import largest


def main(name: str, dtype: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as loop:
        save_tiny(Path(folder), name)
        bench = Bench(Path(folder), "cuda", False, RolloutEngine)
        bench.dtype = dtype
        config = bench.config
        bench.config = bench.engine.config = config.model_copy(
            update={
                "trainer": config.trainer.model_copy(update={"dtype": dtype}),
                "rollout": config.rollout.model_copy(update=host_cuda.ROLLOUT),
            }
        )
        expected = bench.of_hugging_face()
        try:
            loop.run(bench.start())
            for transport in ("shm", "cuda_ipc"):
                loop.run(bench.publish(transport))
            base, _ = loop.run(bench.engine.score(bench.sequences, None))
            adapter, _ = loop.run(bench.engine.score(bench.sequences, bench.version))
        finally:
            loop.run(bench.shutdown())
    return {
        "base": largest(base, expected["base"]),
        "adapter": largest(adapter, expected["adapter"]),
        "effect": largest(adapter, base),
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])), flush=True)
