"""`lora-moe-rl bench loading`: what a trainer rank reads of a checkpoint, and its memory meanwhile.

A synthetic checkpoint with DeepSeek-V3's tensor names, in bfloat16, is loaded as at the start of a
run, by ranks that each are a process. Of each rank:

    holds      the frozen base that it keeps
    takes      the tensors that it takes from the files, whole, for itself or, as the first of its
               tensor-parallel group, for the group
    read       what the system read from the disk on its behalf, the page cache being empty at the
               start; ranks of one machine share what one of them has read
    peak       its anonymous memory at most, above what it had before loading
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lora_moe_rl.bench.process import disk_bytes, status_bytes, to_disk
from lora_moe_rl.bench.report import conclude, require_room, temporary
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.options import above_zero, result_parser
from lora_moe_rl.verify import report

ROWS = ("holds", "takes", "read", "peak")
SAMPLE_S = 0.01
BF16 = 2
LAYOUTS = {
    "1": {},
    "ep2": {"world_size": 2, "ep": 2},
    "ep4": {"world_size": 4, "ep": 4},
    "tp2": {"world_size": 2, "tp": 2},
    "pp2": {"world_size": 2, "pp": 2},
    "tp2ep2": {"world_size": 2, "tp": 2, "ep": 2},
    "tp2pp2": {"world_size": 4, "tp": 2, "pp": 2},
}


def main(argv: Sequence[str]) -> int:
    parser = result_parser("bench loading", __doc__)
    parser.add_argument("--gb", type=above_zero, default=6.0, help="size of the checkpoint (6)")
    parser.add_argument("--layout", choices=list(LAYOUTS), default="ep4", help="(ep4)")
    options = parser.parse_args(argv)
    with temporary() as folder:
        require_room(folder, 1.1 * options.gb + 1, f"bench loading --gb {options.gb:g}", "TMPDIR")
        result = measure(Path(folder), options.gb, options.layout)
    conclude(result, options.json, parts)
    return 0


def measure(folder: Path, gigabytes: float, layout: str) -> dict[str, Any]:
    from lora_moe_rl.bench.export_model import write_model
    from lora_moe_rl.verify.processes import run_processes
    from lora_moe_rl.verify.ranks import free_address

    model = folder / "model"
    total = write_model(model, _layers(gigabytes * 1e9), "bf16")
    trainer = LAYOUTS[layout] | {"device": "cpu", "dtype": "bfloat16"}
    config = RunConfig.model_validate(
        {"model": {"path": str(model)}, "trainer": trainer, "adapter": {"rank": 1}}
    )
    to_disk(model, forget=True)
    size = config.trainer.world_size
    ranks = run_processes(size, load, free_address(), config, model, timeout_s=900)
    return {
        "layout": layout,
        "checkpoint": total,
        "ranks": ranks,
        "read_in_all": sum(rank["read"] for rank in ranks),
        "taken_in_all": sum(rank["takes"] for rank in ranks),
    }


def _layers(size: float) -> int:
    """Layers of a checkpoint of about `size` bytes: a dense one and at least one with experts."""
    from lora_moe_rl.adapters.families import ModelShape
    from lora_moe_rl.bench.export_model import CONFIG

    shape = ModelShape.from_hf_config(CONFIG | {"num_hidden_layers": 2})

    def layer(number: int) -> int:
        sizes = shape.modules(number).values()
        return BF16 * sum(i * o * (experts or 1) for i, o, experts in sizes)

    rest = size - layer(0) - 2 * BF16 * shape.vocab_size * shape.hidden_size
    return 1 + max(1, round(rest / layer(1)))


def load(rank: int, address: str, config: RunConfig, model: Path) -> dict[str, float]:
    """One rank: loads as a run does. A job of `run_processes`."""
    from lora_moe_rl.trainer.device import Device
    from lora_moe_rl.trainer.model import build_model, init_process_groups

    device = Device.choose(config.trainer)
    device.prepare(threads=1)
    init_process_groups(config.trainer, device, rank, address)
    taken = _count_taken()
    before, read, started = status_bytes("RssAnon"), disk_bytes(), time.perf_counter()
    with Peak() as peak:
        num_layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
        chunks = build_model(model, config.trainer, num_layers, device)
    held = [*(p for c in chunks for p in c.parameters()), *(b for c in chunks for b in c.buffers())]
    return {
        "holds": sum(tensor.nbytes for tensor in held),
        "takes": taken(),
        "read": disk_bytes() - read,
        "peak": peak.bytes - before,
        "seconds": time.perf_counter() - started,
    }


def _count_taken():
    """Counts the tensors that Megatron-Bridge takes from the files on this rank. The mappings of
    the other ranks of a tensor-parallel group look at a tensor's shape, and leave its pages where
    they are."""
    from megatron.bridge.models.hf_pretrained.state import SafeTensorsStateSource
    from megatron.core import parallel_state as ps

    upstream = SafeTensorsStateSource.load_tensors
    bytes_taken = 0

    def load_tensors(self, keys):
        nonlocal bytes_taken
        tensors = upstream(self, keys)
        if ps.get_tensor_model_parallel_rank() == 0:
            bytes_taken += sum(tensor.nbytes for tensor in tensors.values())
        return tensors

    SafeTensorsStateSource.load_tensors = load_tensors
    return lambda: bytes_taken


class Peak:
    """The most anonymous memory of this process inside the context, in `bytes`."""

    def __enter__(self) -> Peak:
        self.bytes, self.ended = status_bytes("RssAnon"), threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while not self.ended.wait(SAMPLE_S):
            self.bytes = max(self.bytes, status_bytes("RssAnon"))

    def __exit__(self, *_) -> None:
        self.ended.set()
        self.thread.join()


def parts(result: dict[str, Any]) -> Iterator[Any]:
    """What is printed of the figures."""
    total = result["checkpoint"]
    columns = ["rank", *(f"{row} MB" for row in ROWS), "seconds"]
    title = f"{result['layout']}, checkpoint of {total / 1e6:,.0f} MB"
    table = report.table(columns, title, left=())
    for number, rank in enumerate(result["ranks"]):
        cells = (f"{rank[row] / 1e6:,.0f}" for row in ROWS)
        table.add_row(str(number), *cells, f"{rank['seconds']:.1f}")
    yield table
    yield f"read from the disk / checkpoint: {result['read_in_all'] / total:.3f}"
    yield f"taken by all ranks / checkpoint: {result['taken_in_all'] / total:.3f}"
