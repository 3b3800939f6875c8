"""Nothing is rejected."""

from __future__ import annotations

from lora_moe_rl.algorithms.rejections.base import Rejection


class NoRejection(Rejection):
    rejects = False
