"""The words of `lora-moe-rl plan`."""

from __future__ import annotations

import argparse
from pathlib import Path

from lora_moe_rl.config.options import above_zero, positive, result_parser
from lora_moe_rl.planner.facts import PACKED
from lora_moe_rl.planner.hardware import DEFAULT_GPU, GPUS

ABOUT = """\
What a run needs, from the model's config alone: memory of every trainer rank and engine rank,
bytes of refits and router decisions, operations a token, and seconds of a step by a roofline.
Needs no torch, GPU, weights or network. Exit code 1 when the run does not fit, 2 when the layout
does not divide the model.

    lora-moe-rl plan recipes/kimi_k2_1t.py adapter.rank=16
    lora-moe-rl plan --model kimi-k2 --gpus 64 --gpu-memory 80 --rank 32
    lora-moe-rl plan --model qwen3-30b-a3b --gpus 8 --search

With --model and no trainer.world_size, the fastest layout that is found is planned. It has what is
given of trainer.tp, pp, ep and recompute, and of rollout.engines, tp, ep, fully_sharded and
gpu_memory_utilization.
"""


def parser() -> argparse.ArgumentParser:
    made = result_parser("plan", ABOUT)
    made.add_argument("words", nargs="*", metavar="RECIPE or key=value")
    made.add_argument("--model", help="a published model (kimi-k2), or a directory")
    made.add_argument("--gpus", type=positive, help="GPUs of the cluster")
    made.add_argument("--gpu", choices=list(GPUS), help=f"their kind ({DEFAULT_GPU})")
    about = "where it is not the kind's"
    made.add_argument("--gpu-memory", type=above_zero, metavar="GIB", help=about)
    about = "of a GPU to other nodes"
    made.add_argument("--bandwidth", type=above_zero, metavar="GB/S", help=about)
    about = "which a tensor-parallel group cannot exceed (8)"
    made.add_argument("--gpus-per-node", type=positive, help=about)
    about = "of a node's host (128 for each of its GPUs)"
    made.add_argument("--host-memory", type=above_zero, metavar="GIB", help=about)
    made.add_argument("--rank", type=positive, help="short for adapter.rank")
    formats = ("bf16", *PACKED)
    about = "the trainer's frozen base, as if held in this format (as it is trained)"
    made.add_argument("--base", choices=formats, help=about)
    about = "the engines' weights (as the checkpoint has them)"
    made.add_argument("--served", choices=formats, help=about)
    made.add_argument("--prompt-tokens", type=positive, help="mean (half of the most)")
    made.add_argument("--response-tokens", type=positive, help="mean (half of the most)")
    made.add_argument("--search", action="store_true", help="propose layouts, fastest first")
    made.add_argument("--top", type=positive, default=8, help="of --search: how many (8)")
    about = "build ranks of every stage without values and compare (needs torch and Megatron)"
    made.add_argument("--build", action="store_true", help=about)
    made.add_argument("--published", action="store_true", help="compare with published figures")
    about = "by what this run measured: the lag and the split of GPUs that keep both sides busy"
    made.add_argument("--run", type=Path, metavar="RUN", help=about)
    about = "write the planned run as a recipe"
    made.add_argument("--write", type=Path, metavar="RECIPE.py", help=about)
    made.add_argument("--png", type=Path, metavar="FILE", help="draw memory by class of rank")
    return made
