"""`lora-moe-rl bench refit`: an adapter version into vLLM, beside vLLM's own ways and a plain copy.

    disk       vLLM's own path: a PEFT directory, one tensor an expert, load_inplace
    in memory  LoRAModel.from_lora_tensors in the worker, of tensors that are there already
    publish    ours, whole: 2 trainer ranks write, check and hash; the engine, another process,
               checks and writes into a slot and serves it
    write      ours, the receiver's write into vLLM's slots alone
    memcpy     a plain copy of as many bytes, in the same process and thread

The adapter has the site counts of Qwen3-30B-A3B, in bfloat16; the base has its layers and experts
with tiny widths. Nothing is printed unless vLLM answers the same under its own path and under ours.
Then: generation during a refit, memory, and the plan alone for Kimi-K2.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from lora_moe_rl.bench.refit_report import GOALS, parts
from lora_moe_rl.bench.report import busy_cores, conclude, cores, temporary
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.options import positive, result_parser
from lora_moe_rl.errors import BenchmarkError
from lora_moe_rl.rollout.facts import slot_rank
from lora_moe_rl.upstream.versions import vllm_on_cpu
from lora_moe_rl.verify.comparisons import largest

RANK, ALPHA = 16, 32
WARMUP, COPIES = 2, 20
STREAMS, STREAM_ROUNDS, WINDOW_S, BEFORE_S = 4, 3, 1.0, 2.0
PROBE = [[(7 * i + j) % 60 + 1 for j in range(24)] for i in range(2)]
LAYOUTS = {"ep2": {"ep": 2}, "pp2": {"pp": 2}}

Events = Sequence[tuple[float, int]]


def main(argv: Sequence[str]) -> int:
    """Raises BenchmarkError when vLLM does not answer as it should, whatever the speed."""
    parser = result_parser("bench refit", __doc__)
    parser.add_argument("--rounds", type=positive, default=7, help="measured loads of each way (7)")
    parser.add_argument(
        "--trainer", choices=list(LAYOUTS), default="ep2", help="the 2 trainer ranks (ep2)"
    )
    options = parser.parse_args(argv)
    conclude(judged(options.rounds, options.trainer), options.json, parts)
    return 0


def judged(rounds: int, trainer: str) -> dict[str, Any]:
    """All figures, beside their goals. Raises BenchmarkError as `main` does."""
    from lora_moe_rl.bench.refit_plan import kimi_k2

    with temporary() as folder:
        result = measure(Path(folder), rounds, trainer)
    result["kimi_k2"] = kimi_k2()
    result["goals"] = {name: judge(result) for name, judge in GOALS.items()}
    return result


def make_config(folder: Path, trainer: str) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "bench",
            "model": {"path": str(folder / "model"), "max_length": 4096},
            "adapter": {"rank": RANK, "alpha": ALPHA},
            "trainer": {"world_size": 2, "dtype": "bfloat16", **LAYOUTS[trainer]},
            "rollout": {"max_response_tokens": 2048} | _eager(),
        }
    )


def _eager() -> dict[str, bool]:
    """On GPUs there are no graphs: no load uses them, and each would have all 48 layers."""
    return {} if vllm_on_cpu() else {"enforce_eager": True}


def measure(folder: Path, rounds: int, trainer: str) -> dict[str, Any]:
    import ray

    from lora_moe_rl.adapters.families import ModelShape
    from lora_moe_rl.adapters.spec import AdapterSpec
    from lora_moe_rl.bench import refit_model
    from lora_moe_rl.cluster.ray_start import prepare_ray, start_ray

    busy = busy_cores()
    config = make_config(folder, trainer)
    refit_model.save_model(folder / "model")
    shape = ModelShape.from_hf_config(json.loads((folder / "model/config.json").read_text()))
    spec = AdapterSpec.build(shape, config.adapter)
    tensors = refit_model.save_adapter(folder / "adapter", spec, config)
    prepare_ray()
    start_ray(3)
    try:
        bench = Bench(config, spec, folder)
        seconds = bench.vllm_ways(rounds) | bench.ours(rounds)
        return {
            "base": {
                "layers": refit_model.LAYERS,
                "experts": refit_model.EXPERTS,
                "experts_per_token": refit_model.TOP_K,
                **refit_model.WIDTHS,
            },
            "trainer": trainer,
            "cores": cores(),
            "busy_cores_before": busy,
            "rounds": rounds,
            "adapter": {"rank": RANK, "tensors": tensors, "bytes": bench.receipt.bytes},
            "seconds": {
                name: {"median": median(values), "best": min(values)}
                for name, values in seconds.items()
            },
            "transfers_a_layer": bench.transfers,
            "logprobs": bench.effect,
            "memory": bench.memory(),
            "generation": bench.generation(),
        }
    finally:
        ray.shutdown()


class TooShort(BenchmarkError):
    """Requests that ended before what was to be measured: the machine has become faster."""


class Bench:
    """One engine and two sending ranks, each in a process of its own."""

    def __init__(self, config: RunConfig, spec: Any, folder: Path):
        import ray

        from lora_moe_rl.bench.refit_engine import BenchEngine
        from lora_moe_rl.bench.refit_model import SendingRank

        self.directory, self.version = str(folder / "adapter"), -1
        self.longest = config.rollout.max_response_tokens
        self.engine: Any = ray.remote(num_cpus=1)(BenchEngine).remote(
            config, config.model.path, spec, 0, str(folder / "engine.log")
        )
        sender: Any = ray.remote(num_cpus=1)(SendingRank)
        self.senders = [sender.remote(config, spec, rank) for rank in range(2)]
        try:
            ray.get(self.engine.start.remote())
        except Exception as error:
            log = (folder / "engine.log").read_text()[-3000:]
            raise BenchmarkError(f"vLLM did not start: {error}\n{log}") from error
        self._plan(config, spec)
        self.base = self._get("score_version", PROBE, None)

    def _plan(self, config: RunConfig, spec: Any) -> None:
        import ray

        from lora_moe_rl.refit.parts import part_layouts
        from lora_moe_rl.refit.plan import EngineLayout, make_plan

        plan = make_plan(spec, config.trainer, EngineLayout(slot_rank(spec)), itemsize=2)
        links = {(t.source, t.site.layer) for t in plan.transfers}
        layers = spec.shape.num_layers
        self.transfers = {
            "all": len(plan.transfers) / layers,
            "most_on_a_link": max(
                sum((t.source, t.site.layer) == link for t in plan.transfers) for link in links
            ),
        }
        self.layouts = part_layouts(plan, spec, "bfloat16")
        ray.get([sender.prepare_refit.remote(self.layouts) for sender in self.senders])

    def vllm_ways(self, rounds: int) -> dict[str, list[float]]:
        """Seconds of vLLM's two ways; keeps what it says under the adapter."""
        seconds = {"disk": [self._get("timed_load", self.directory) for _ in range(rounds + 1)]}
        self.expected = self._get("score_files", PROBE, self.directory)[0]
        seconds["in_memory"] = [
            self._get("load_in_memory", self.directory) for _ in range(rounds + 1)
        ]
        self._compare("in memory", self._get("score_files", PROBE, self.directory)[0])
        self._get("unload_files")
        return {name: values[1:] for name, values in seconds.items()}

    def ours(self, rounds: int) -> dict[str, list[float]]:
        """Seconds of ours, once it is known to be right, and of the plain copy."""
        self._get("prepare_refit", self.layouts)
        for _ in range(WARMUP):  # each slot once
            self.publish()
            self._compare("ours", self._get("score_version", PROBE, self.version))
        stages: dict[str, list[float]] = {}
        for _ in range(rounds):
            for stage, value in self.publish().items():
                stages.setdefault(stage, []).append(value)
        self._compare("ours", self._get("score_version", PROBE, self.version))
        return stages | self._get("copies", COPIES, *self.sent)

    def publish(self) -> dict[str, float]:
        """A version from the trainer ranks' tensors to being served, as a run does it. Seconds, in
        all (`publish`) and by stage."""
        import ray

        started = time.perf_counter()
        self.version += 1
        self.sent = [sender.send.remote(self.version) for sender in self.senders]
        ref = self.engine.publish.remote(self.version, *self.sent)
        ray.wait(self.sent, num_returns=len(self.sent), fetch_local=False)
        written = time.perf_counter()
        self.receipt = ray.get(ref)
        stages = {f"publish/{k}": v for k, v in self.receipt.seconds.items() if k != "total"}
        return {
            "publish": time.perf_counter() - started,
            "publish/send": written - started,
        } | stages

    def memory(self) -> dict[str, int]:
        """Bytes of the engine's worker while it takes a version, and of the largest part."""
        import ray

        sent = [sender.send.remote(self.version + 1) for sender in self.senders]
        found = ray.get(self.engine.staging_memory.remote(self.version + 1, *sent))
        return found | {"largest_part": max(part.nbytes for part in ray.get(sent))}

    def generation(self) -> dict[str, Any]:
        """Tokens a second around refits, while requests of the version before are in flight."""
        prompts = [[5 + i, 6, 7, 8] for i in range(STREAMS)]
        started = time.perf_counter()
        self._get("stream", prompts, self.version, 24)
        step = (time.perf_counter() - started) / 24
        tokens = min(int((BEFORE_S + 2 * WINDOW_S + 2) / step), self.longest)
        rates = []
        while len(rates) < STREAM_ROUNDS:
            try:
                rates.append(self._around(prompts, tokens))
            except TooShort:
                if tokens == self.longest:
                    raise
                tokens = min(2 * tokens, self.longest)
        return {
            "streams": STREAMS,
            "tokens_per_second_before": mean(before for before, _ in rates),
            "tokens_per_second_around": mean(around for _, around in rates),
            "ratio": median(around / before for before, around in rates),
            "requests": STREAMS * STREAM_ROUNDS,
            "not_finished": 0,  # else there is an error
        }

    def _around(self, prompts: list[list[int]], tokens: int) -> tuple[float, float]:
        """Tokens a second in the seconds before a refit, and in the one around it."""
        import ray

        answer = self.engine.stream.remote(prompts, self.version, tokens)
        time.sleep(BEFORE_S + WINDOW_S)
        started = time.monotonic()
        self.publish()
        middle = (started + time.monotonic()) / 2
        events, reasons = ray.get(answer)
        if set(reasons) != {"length"} or sum(count for _, count in events) != tokens * len(prompts):
            raise BenchmarkError(f"requests did not finish during a refit: {reasons}")
        start, end = middle - WINDOW_S / 2, middle + WINDOW_S / 2
        return rate(events, start - BEFORE_S, start), rate(events, start, end)

    def _compare(self, name: str, found: list[np.ndarray]) -> None:
        """Raises BenchmarkError unless logprobs are those of vLLM's own path, and not the base's.
        Equal to the bit: the slots hold the same values, and the batches are the same."""
        differ = largest(found, self.expected)
        self.effect = {"difference": differ, "effect": largest(self.expected, self.base)}
        if differ != 0 or not self.effect["effect"] > 0:
            raise BenchmarkError(
                f"no seconds to report: logprobs of {name} differ by {differ:g} from those of "
                f"vLLM's own path, which differ by {self.effect['effect']:g} from the base's"
            )

    def _get(self, method: str, *args: Any) -> Any:
        import ray

        return ray.get(getattr(self.engine, method).remote(*args))


def rate(events: Events, start: float, end: float) -> float:
    """Tokens a second between two moments. Outputs come in steps: between two of them the count is
    taken to grow evenly. Raises TooShort when the outputs do not reach so far."""
    times = sorted({moment for moment, _ in events})
    if not times or times[0] > start or times[-1] < end:
        raise TooShort(
            f"requests ran for {times[-1] - times[0] if times else 0:.1f} s only, too short to "
            "measure a refit in"
        )
    ordered = sorted(events)
    moments = np.array([moment for moment, _ in ordered])
    counts = np.cumsum([count for _, count in ordered])
    return float(np.diff(np.interp([start, end], moments, counts))[0] / (end - start))
