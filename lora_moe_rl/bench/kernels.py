"""`lora-moe-rl bench kernels`: expert adapters, merges and the route codec; others' beside them.

First every kernel is compared with its float64 reference on small operands: when one is wrong, no
figure is printed. On the CPU the sides of each shape are divided by 8.

    adapters   forward and backward of one MoE layer's gate, up and down adapters; beside them what
               others do, and the base layer's forward and input gradient
    merge      W += scale * B A into stacked experts
    codec      router decisions of a model, unpacked layer by layer
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from lora_moe_rl.bench import kernel_contenders as contenders
from lora_moe_rl.bench import kernel_tables
from lora_moe_rl.bench.kernel_contenders import SHAPES, Layer, Shape, Unavailable
from lora_moe_rl.bench.kernel_gate import gate
from lora_moe_rl.bench.report import busy_cores, conclude
from lora_moe_rl.config.options import positive, result_parser
from lora_moe_rl.errors import BenchmarkError
from lora_moe_rl.kernels import merge
from lora_moe_rl.kernels.merge import formats
from lora_moe_rl.kernels.route_codec import RowLayout
from lora_moe_rl.kernels.route_codec.op import layer_ids
from lora_moe_rl.upstream.doctor import installed

TOKENS = {"cpu": (512,), "cuda": (4096, 32768, 65536)}
RANKS = {"cpu": (8, 32), "cuda": (8, 32, 128)}
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}
VERSIONS = ("torch", "triton", "megatron-bridge", "peft")
LOADS = ("balanced", "zipf")
MERGE_RANK = 32
CODEC_TOKENS = {"cpu": 4096, "cuda": 1 << 18}
CODEC_LAYOUTS = {
    "qwen3-30b": RowLayout(48, 8, 128),
    "deepseek-v3": RowLayout(58, 8, 256),
    "kimi-k2": RowLayout(60, 8, 384),
}
STILL_TO_COME = "These figures are of a CPU; the GPU figures are still to come."
Row = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    """Raises BenchmarkError when a kernel is wrong or a device is missing."""
    parser = result_parser("bench kernels", __doc__)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--tokens", type=positive, nargs="+", help="before top-k")
    parser.add_argument("--ranks", type=positive, nargs="+")
    options = parser.parse_args(argv)
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise BenchmarkError("--device cuda, but torch sees no GPU; use --device cpu")
    tokens, ranks = options.tokens or TOKENS[device], options.ranks or RANKS[device]
    require_right(device)
    result = figures(options.shape, device, tokens, ranks)
    conclude(result, options.json, kernel_tables.parts)
    return 0


def require_right(device: str) -> None:
    """Raises BenchmarkError when a kernel differs from its reference: nothing is measured then."""
    wrong = gate(device, DTYPE[device])
    if wrong:
        raise BenchmarkError("no figures, the kernels are wrong:\n" + "\n".join(wrong))


def figures(names: Sequence[str], device: str, tokens, ranks) -> dict[str, Any]:
    torch.backends.cuda.matmul.allow_tf32 = False
    busy = busy_cores()
    shapes = [
        SHAPES[name] if device == "cuda" else contenders.on_cpu(SHAPES[name]) for name in names
    ]
    ceilings = measure_ceilings(device)
    lora = [
        measure_layer(shape, count, rank, load, device, ceilings)
        for shape in shapes
        for count in tokens
        for rank in ranks
        for load in LOADS
    ]
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else f"cpu, {_threads()}",
        "date": time.strftime("%Y-%m-%d"),
        "versions": {name: installed(name) for name in VERSIONS},
        "busy_cores_before": busy,
        "gpu_figures": None if device == "cuda" else STILL_TO_COME,
        "ceilings": ceilings,
        "adapters": lora,
        "merge": [row for shape in shapes for row in measure_merges(shape, device, ceilings)],
        "codec": [measure_codec(name, device, ceilings) for name in names],
    }


def measure_ceilings(device: str) -> dict[str, float]:
    """Copy bandwidth in GB/s (bytes read and written) and matmul TFLOP/s of this machine."""
    elements = 1 << (29 if device == "cuda" else 24)
    source = torch.ones(elements, device=device, dtype=DTYPE[device])
    target = torch.empty_like(source)
    copy = seconds(lambda: target.copy_(source), device)
    side = 8192 if device == "cuda" else 1024
    a = torch.ones(side, side, device=device, dtype=DTYPE[device])
    product = seconds(lambda: a @ a, device)
    return {
        "copy_gb_s": 2 * source.numel() * source.element_size() / copy / 1e9,
        "matmul_tflop_s": 2 * side**3 / product / 1e12,
    }


def measure_layer(
    shape: Shape, tokens: int, rank: int, load: str, device: str, ceilings: dict[str, float]
) -> Row:
    layer = Layer(shape, tokens, rank, load, device, DTYPE[device])
    times: dict[str, float] = {}
    absent: dict[str, str] = {}
    peaks: dict[str, int] = {}
    for name, make in contenders.CONTENDERS.items():
        try:
            times[name], peak = _measured(make, layer, device)
        except Unavailable as reason:
            absent[name] = str(reason)
        except Exception as error:
            if name in contenders.OWN:
                raise
            absent[name] = f"{type(error).__name__}: {error}"[:500]
        else:
            peaks |= {} if peak is None else {name: peak}
    gb_s = layer.adapter_bytes() / times["ours"] / 1e9
    tflop_s = layer.adapter_flops() / times["ours"] / 1e12
    return {
        "shape": vars(shape), "tokens": tokens, "rank": rank, "load": load,
        "dtype": str(DTYPE[device]).removeprefix("torch."),
        "seconds": times, "not_run": absent, "peak_bytes": peaks or None,
        "share_of_base": times["ours"] / times["base layer"],
        "gb_s": gb_s, "share_of_copy": gb_s / ceilings["copy_gb_s"],
        "tflop_s": tflop_s, "share_of_matmul": tflop_s / ceilings["matmul_tflop_s"],
    }  # fmt: skip


def _measured(make, layer: Layer, device: str) -> tuple[float, int | None]:
    """Seconds of a step, and on a GPU the bytes that it allocates at the most."""
    step = make(layer)
    if device != "cuda":
        return seconds(step, device), None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    taken = seconds(step, device)
    return taken, torch.cuda.max_memory_allocated() - before


def measure_merges(shape: Shape, device: str, ceilings: dict[str, float]) -> list[Row]:
    E, out, width = shape.experts, 2 * shape.intermediate, shape.hidden
    W = torch.randn(E, out, width, device=device)
    A = torch.randn(E, MERGE_RANK, width, device=device)
    B = torch.zeros(E, out, MERGE_RANK, device=device)  # so that repeating changes nothing much
    fp8, int4 = formats.quantise_fp8(W), formats.quantise_int4(W, torch.bfloat16)
    W = W.bfloat16()
    cases: dict[str, tuple[tuple[torch.Tensor, ...], Callable[[], object]]] = {
        "bfloat16": ((W,), lambda: merge.merge_delta_(W, A, B, 1.0)),
        "fp8 block-128": (fp8, lambda: merge.merge_delta_fp8_(*fp8, A, B, 1.0)),
        "int4 group-32": (int4, lambda: merge.merge_delta_int4_(*int4, A, B, 1.0)),
    }
    rows = []
    for name, (tensors, call) in cases.items():
        moved = 2 * sum(t.numel() * t.element_size() for t in tensors) + 4 * (A.numel() + B.numel())
        taken = seconds(call, device)
        gb_s = moved / taken / 1e9
        rows.append(
            {"shape": vars(shape), "format": name, "rank": MERGE_RANK, "seconds": taken}
            | {"gb_s": gb_s, "share_of_copy": gb_s / ceilings["copy_gb_s"]}
        )
    return rows


def measure_codec(name: str, device: str, ceilings: dict[str, float]) -> Row:
    """GB/s of one layer's int64 ids, and for the share of a copy all bytes that move."""
    layout = CODEC_LAYOUTS[name]
    tokens = CODEC_TOKENS[device]
    packed = torch.zeros(tokens, layout.row_bytes, device=device, dtype=torch.uint8)
    taken = seconds(lambda: layer_ids(packed, layout.num_layers // 2, layout), device)
    written = 8 * tokens * layout.top_k
    moved = written + packed.numel() / layout.num_layers
    return {
        "layout": vars(layout), "name": name, "tokens": tokens, "row_bytes": layout.row_bytes,
        "unpack_gb_s": written / taken / 1e9,
        "unpack_share_of_copy": moved / taken / 1e9 / ceilings["copy_gb_s"],
    }  # fmt: skip


def seconds(call: Callable[[], object], device: str) -> float:
    """Seconds of a call, of several after warming up: the median on a GPU; on a CPU, which others
    use too, the least."""
    call()
    if device == "cuda":
        return _cuda_seconds(call)
    taken = []
    while len(taken) < 5 or (sum(taken) < 0.2 and len(taken) < 25):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return min(taken)


def _cuda_seconds(call: Callable[[], object]) -> float:
    for _ in range(2):
        call()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(10)]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in events) / 1e3


def _threads() -> str:
    return f"{torch.get_num_threads()} threads"
