"""`lora-moe-rl bench export`: merging a checkpoint, against `cp` of its files and against PEFT.

Synthetic checkpoints with DeepSeek-V3's names and layout, several shards, and a random adapter of
rank 32 on every linear. Each merge runs in a process of its own, whose peak memory is told; its
adapter is read from a file. Files are out of the page cache before each run, and on the disk at its
end: `cp` is followed by `sync` of its files.

    bf16    two sizes; beside the smaller one PEFT: from_pretrained, get_peft_model with the same
            modules, merge_and_unload, save_pretrained
    fp8     DeepSeek-V3's blocks: dequantised, merged, quantised
    int4    Kimi-K2-Thinking's groups, likewise
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lora_moe_rl.bench.process import to_disk
from lora_moe_rl.bench.report import all_met, conclude, goal, require_room, temporary
from lora_moe_rl.config.options import above_zero, result_parser
from lora_moe_rl.errors import BenchmarkError
from lora_moe_rl.verify import report
from lora_moe_rl.verify.report import progress

Row = dict[str, Any]
GB, MB = 1e9, 1e6
LAYER_GB = 0.84  # of a MoE layer in bfloat16
FIXED_GB = 0.36
QUANTISED_LAYERS = 2
MOST_MEMORY_GB, LEAST_OF_CP = 1.5, 0.5
CHILD_TIMEOUT_S = 3600
PHASES = 13  # three of each checkpoint, and PEFT's
PEFT_MEMORY = 3.0  # sizes of the model that PEFT's way needs


def main(argv: Sequence[str]) -> int:
    """1 when a goal is missed. Raises BenchmarkError when there is no room."""
    options = _parser().parse_args(argv)
    with progress(PHASES, options.json) as say, _folder(options) as folder:
        result = measure(folder, options.gb, say)
    conclude(result, options.json, parts)
    return 0 if all_met(result) else 1


def _parser() -> argparse.ArgumentParser:
    parser = result_parser("bench export", __doc__)
    parser.add_argument("--gb", type=above_zero, default=6.5, help="size of the larger one (6.5)")
    parser.add_argument("--dir", type=Path, help="on which disk; by default that of $TMPDIR")
    return parser


@contextmanager
def _folder(options: argparse.Namespace) -> Iterator[Path]:
    """Removed at the end, whatever happens."""
    with temporary(options.dir) as folder:
        require_room(folder, 2.2 * options.gb + 2, f"bench export --gb {options.gb:g}", "--dir")
        yield Path(folder)


def measure(folder: Path, gb: float, say) -> dict[str, Any]:
    large = max(math.ceil((gb - FIXED_GB) / LAYER_GB) + 1, 3)
    small = max(large // 2, 2)
    rows = [
        _measure_one(folder, "bf16", small, say, with_peft=True),
        _measure_one(folder, "bf16", large, say),
        *(_measure_one(folder, form, QUANTISED_LAYERS, say) for form in ("fp8", "int4")),
    ]
    plain = [row for row in rows if row["form"] == "bf16"]
    memory = max(row["memory_gb"] for row in rows)
    speed = min(row["cp_s"] / row["merge_s"] for row in plain)
    goals = {
        "peak memory, GB": goal(memory, MOST_MEMORY_GB),
        "throughput / cp": goal(speed, LEAST_OF_CP, at_least=True),
    }
    return {"rows": rows, "goals": goals}


def _measure_one(folder: Path, form: str, layers: int, say, with_peft: bool = False) -> Row:
    from lora_moe_rl.bench.export_model import spec_of, write_adapter, write_model

    base, adapter = folder / "base", folder / "adapter.safetensors"
    say(f"{form}, {layers} layers: writing the checkpoint")
    nbytes = write_model(base, layers, form)
    write_adapter(adapter, spec_of(base))
    to_disk(base)
    row: Row = {"form": form, "layers": layers, "bytes": nbytes}
    row["shards"] = len(list(base.glob("*.safetensors")))
    say(f"{form}, {layers} layers: cp")
    row |= _copy(base, folder / "out")
    say(f"{form}, {layers} layers: merging")
    to_disk(base, forget=True)
    row |= _child("merge", base, adapter, folder / "out")
    shutil.rmtree(folder / "out")
    if with_peft:
        say(f"{form}, {layers} layers: PEFT")
        row["peft"] = _peft(base, adapter, folder / "out", nbytes)
    shutil.rmtree(base)
    adapter.unlink()
    return row


def _copy(base: Path, out: Path) -> Row:
    to_disk(base, forget=True)
    out.mkdir()
    files = [str(path) for path in base.glob("*.safetensors")]
    start = time.perf_counter()
    subprocess.run(["cp", *files, str(out)], check=True)
    copied = time.perf_counter()
    to_disk(out)
    ended = time.perf_counter()
    shutil.rmtree(out)
    return {"cp_s": ended - start, "cp_without_sync_s": copied - start}


def _peft(base: Path, adapter: Path, out: Path, nbytes: int) -> Row:
    import psutil

    available = psutil.virtual_memory().available
    if available < PEFT_MEMORY * nbytes:
        return {
            "left_out": f"it takes about {PEFT_MEMORY * nbytes / GB:.0f} GB of memory, and "
            f"{available / GB:.0f} GB are free"
        }
    to_disk(base, forget=True)
    row = _child("peft", base, adapter, out)
    shutil.rmtree(out, ignore_errors=True)
    return row


def _child(job: str, base: Path, adapter: Path, out: Path) -> Row:
    command = [sys.executable, "-m", "lora_moe_rl.bench.export_child", job]
    done = subprocess.run(
        [*command, str(base), str(adapter), str(out)],
        capture_output=True,
        text=True,
        timeout=CHILD_TIMEOUT_S,
    )
    if done.returncode:
        raise BenchmarkError(f"the {job} process ended with {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def parts(result: dict[str, Any]) -> Iterator[Any]:
    """What is printed of the figures, the goals left out."""
    columns = ("base", "GB", "shards", "merge s", "MB/s", "cp s", "of cp", "peak GB")
    table = report.table([*columns, "error / weight", "error / change", "cosine", "lost"])
    for row in result["rows"]:
        table.add_row(
            row["form"],
            f"{row['bytes'] / GB:.2f}",
            str(row["shards"]),
            f"{row['merge_s']:.1f}",
            f"{row['bytes'] / MB / row['merge_s']:.0f}",
            f"{row['cp_s']:.1f} ({row['cp_without_sync_s']:.1f} without sync)",
            f"{row['cp_s'] / row['merge_s']:.0%}",
            f"{row['memory_gb']:.2f}",
            *(f"{row[key]:.2g}" for key in ("error", "error_over_change", "cosine")),
            f"{row['lost']:.1%}",
        )
        peft = row.get("peft", {})
        if "left_out" in peft:
            yield f"PEFT is left out: {peft['left_out']}"
        elif peft:
            seconds, memory = f"{peft['merge_s']:.1f}", f"{peft['memory_gb']:.2f}"
            table.add_row("  PEFT", "", "", seconds, "", "", "", memory)
    yield table
