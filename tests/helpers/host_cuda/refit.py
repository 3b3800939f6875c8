"""`lora-moe-rl verify refit` on such GPUs, with engines as small as they have to be there.

python -m host_cuda.refit --model qwen3_moe --engines tp1 --trainers tp1
"""

from __future__ import annotations

import sys

import host_cuda
from lora_moe_rl.cli import main
from lora_moe_rl.verify import refit

if __name__ == "__main__":
    refit.BASE = refit.BASE | {"rollout": host_cuda.ROLLOUT}
    raise SystemExit(main(["verify", "refit", *sys.argv[1:]]))
