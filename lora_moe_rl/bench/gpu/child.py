"""The process of one stage: `python -m lora_moe_rl.bench.gpu.child NAME DEVICE FILE`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from lora_moe_rl.bench.gpu.parts import Parts
from lora_moe_rl.bench.gpu.stages import STAGES


def main(arguments: Sequence[str]) -> int:
    """Returns 1 when a part of the stage failed, or when it has none."""
    name, device, file = arguments
    stage, parts = STAGES[name], Parts(Path(file))
    import_module(f"lora_moe_rl.bench.gpu.stages.{stage.module}").run(parts, device, *stage.options)
    return int(bool(parts.failed) or not parts.values)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of engines and process groups are not waited for
