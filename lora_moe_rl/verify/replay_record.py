"""What vLLM records, under the conditions in which a record may go wrong.

Each engine lives in a process forked from one that has imported vLLM. Every recording carries the
proof that its condition was met: without one it would show nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lora_moe_rl.adapters.spec import AdapterSpec, ModelShape
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import with_settings
from lora_moe_rl.files.untrusted import read_json
from lora_moe_rl.rollout import outputs
from lora_moe_rl.router_replay.table import RouteTable
from lora_moe_rl.verify.processes import apart
from lora_moe_rl.verify.replay_engine import SteppedEngine, prepare_process, samples_and_routes

RESPONSE = 24
SHORT, LONG = 20, 80  # tokens of a prompt
CHUNK = 32  # tokens of a step, where prompts are prefilled in chunks
# Tokens of a block: the least that vLLM's CPU attention takes.
BLOCKS = {"mla": 16, "gqa": 32, "fused_gqa": 32, "gated_gqa": 32}
TIGHT = 256  # tokens of a KV cache, of each kind, that holds two samples of the longest


@dataclass
class Recording:
    """What vLLM sampled and recorded under one condition.

    `proof`: that it was met; `failure`: that it was not, or what went wrong; `absent`: why this
    engine cannot have it.
    """

    name: str
    adapter: bool = False
    sequences: list[list[int]] = field(default_factory=list)
    prompt_lengths: list[int] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)  # of the response tokens
    table: RouteTable | None = None
    proof: str = ""
    failure: str | None = None
    absent: str | None = None
    seconds: float = 0.0


def random_prompts(rng: np.random.Generator, count: int, vocab_size: int) -> list[list[int]]:
    """Random tokens, of uneven length."""
    return [rng.integers(0, vocab_size, n).tolist() for n in rng.integers(SHORT, LONG, count)]


def recorded(
    name: str, answers: Sequence[Any], shape: ModelShape, adapter: bool = False
) -> Recording:
    """What vLLM's final outputs say."""
    samples, table = samples_and_routes(answers, shape)
    return Recording(
        name,
        adapter,
        [s.token_ids.tolist() for s in samples],
        [len(s.prompt_ids) for s in samples],
        [s.logprobs for s in samples],
        table,
    )


class _Recorder:
    """One engine and what is asked of it."""

    def __init__(self, config, spec, model_dir, tensors, samples, **changes: Any):
        self.spec, self.samples = spec, samples
        self.engine = SteppedEngine(config, spec, model_dir, **changes)
        self.engine.publish(tensors)
        # Unseeded: a seeded request that is prefilled in chunks crashes vLLM 0.31 on the CPU.
        self.params = outputs.sampling_params(config, set())
        self.params.ignore_eos = True
        self.rng = np.random.default_rng(config.seed)

    def prompts(self, count: int | None = None) -> list[list[int]]:
        return random_prompts(self.rng, count or self.samples, self.spec.shape.vocab_size)

    def recorded(self, name: str, answers: Sequence[Any], adapter: bool = False) -> Recording:
        return recorded(name, answers, self.spec.shape, adapter)

    def plain(self, name: str, adapter: bool = False) -> Recording:
        """One short request after the other: nothing is shared."""
        params = self.params.clone()
        params.max_tokens = RESPONSE // 3
        answers = [self.engine.generate([prompt], params, adapter)[0] for prompt in self.prompts()]
        found = self.recorded(name, answers, adapter)
        found.proof = f"{len(answers)} requests, one at a time"
        return found

    def batched(self, name: str, adapter: bool = False) -> Recording:
        found = self.recorded(
            name, self.engine.generate(self.prompts(), self.params, adapter), adapter
        )
        found.proof = f"{len(found.sequences)} requests at once"
        return found

    def tensor_parallel(self) -> Recording:
        found = self.batched("tp 2")
        workers = self.engine.llm.vllm_config.parallel_config.tensor_parallel_size
        found.proof = f"{workers} workers"
        if workers != 2:
            found.failure = f"vLLM has {workers} workers instead of 2"
        return found

    def adapted(self) -> Recording:
        """Under an adapter on every routed expert, beside requests on the bare base."""
        prompts = self.prompts()
        names = [self.engine.submit(prompt, self.params, True) for prompt in prompts]
        others = [self.engine.submit(prompt, self.params) for prompt in prompts]
        answers = self.engine.run([*names, *others])
        found = self.recorded("experts' LoRA", answers[: len(names)], True)
        base = self.recorded("", answers[len(names) :])
        sites = sum(site.module.startswith("experts.") for site in self.spec)
        found.proof = f"{sites} sites of experts; "
        return proven_to_move(found, base)

    def prefix_hits(self) -> Recording:
        name = "prefix-cache hits"
        if not self.engine.caches_prefixes:
            what = "linear attention" if self.engine.spec.shape.linear_layers else "MLA"
            return Recording(name, absent=f"vLLM's {what} on the CPU caches no prefixes")
        shared = self.prompts(1)[0][:SHORT] + self.prompts(1)[0][:SHORT]
        prompts = [shared + prompt for prompt in self.prompts()]
        before = self.engine.counter("vllm:prefix_cache_hits")
        self.engine.generate(prompts[:1], self.params)
        found = self.recorded(name, self.engine.generate(prompts, self.params))
        hits = self.engine.counter("vllm:prefix_cache_hits") - before
        found.proof = f"{hits} of {sum(map(len, prompts))} prompt tokens from the cache"
        if not hits:
            found.failure = "vLLM counts no prefix-cache hit"
        return found

    def chunked(self) -> Recording:
        name = "chunked prefill"
        if not self.engine.chunks_prompts:
            return Recording(name, absent="vLLM's MLA on the CPU prefills no chunks")
        found = self.batched(name)
        longer = sum(n > CHUNK for n in found.prompt_lengths)
        found.proof = f"{longer} prompts longer than a step of {CHUNK} tokens"
        if not longer:
            found.failure = f"no prompt was longer than a step of {CHUNK} tokens"
        return found

    def preempted(self) -> Recording:
        found = self.batched("preemption")
        count = self.engine.counter("vllm:num_preemptions")
        found.proof = f"{count} preemptions in a KV cache of {TIGHT} tokens"
        if not count:
            found.failure = "vLLM counts no preemption"
        return found

    def resumed(self) -> Recording:
        """Aborted in the middle, and asked again with what had been sampled."""
        prompts = self.prompts()
        names = [self.engine.submit(prompt, self.params) for prompt in prompts]
        for _ in range(RESPONSE // 2):
            self.engine.llm.step()
        parts = [self.engine.abort(name) for name in names]
        first = self.recorded("", parts)
        rest = self.params.clone()
        rest.max_tokens = RESPONSE // 2
        second = self.recorded("aborted and resumed", self.engine.generate(first.sequences, rest))
        second.logprobs = [
            np.concatenate(pair) for pair in zip(first.logprobs, second.logprobs, strict=True)
        ]
        second.prompt_lengths = first.prompt_lengths
        second.table, differing = _joined(first, second)
        sampled = [len(p) for p in first.logprobs]
        second.proof = f"aborted after {min(sampled)} to {max(sampled)} tokens"
        if not min(sampled):
            second.failure = "a request was aborted before it had sampled a token"
        if differing:
            second.failure = f"{differing} rows were recorded otherwise before the abort and after"
        return second


def _rows(recording: Recording, sample: int) -> tuple[np.ndarray, np.ndarray]:
    """(sorted ids, valid) of one sample."""
    table = recording.table
    assert table is not None
    span = slice(table.offsets[sample], table.offsets[sample + 1])
    return np.sort(table.ids[span], axis=-1), table.valid[span]


def _joined(first: Recording, second: Recording) -> tuple[RouteTable, int]:
    """The rows of before the abort, then those of after; and how many of them differ where both
    were recorded."""
    a, b = first.table, second.table
    assert a is not None and b is not None
    ids, valid, differing = b.ids.copy(), b.valid.copy(), 0
    for i in range(a.num_samples):
        (before, known), (after, again) = _rows(first, i), _rows(second, i)
        n = len(before)
        differing += int(((before != after[:n]).any(-1) & known & again[:n]).sum())
        start = b.offsets[i]
        ids[start : start + n] = a.ids[a.offsets[i] : a.offsets[i + 1]]
        valid[start : start + n] = known
    return RouteTable(ids, valid, b.offsets, b.layers, b.num_experts), differing


def proven_to_move(found: Recording, base: Recording) -> Recording:
    """`found`, under an adapter, whose proof is that it has other routes of the same prompts than
    `base`."""
    differing = _differing_prompts(found, base)
    found.proof += f"{differing:.1%} of the prompts' routes moved"
    if not differing:
        found.failure = "the adapter moved no route of a prompt: it was not served"
    return found


def _differing_prompts(found: Recording, base: Recording) -> float:
    """Share of the prompts' rows that two recordings of the same prompts have different."""
    differing = total = 0
    for i, n in enumerate(found.prompt_lengths):
        (a, _), (b, _) = _rows(found, i), _rows(base, i)
        differing += int((a[: n - 1] != b[: n - 1]).any(-1).sum())
        total += (n - 1) * a.shape[1]
    return differing / max(total, 1)


# By engine: changes to its arguments, and the conditions that it records.
Engines = Mapping[str, tuple[dict[str, Any], tuple[Callable[[_Recorder], Recording], ...]]]
ENGINES: Engines = {
    "roomy": (
        {},
        (
            lambda r: r.plain("plain"),
            lambda r: r.batched("batched"),
            _Recorder.prefix_hits,
            _Recorder.resumed,
            _Recorder.adapted,
        ),
    ),
    "chunked": (
        {
            "enable_chunked_prefill": True,
            "max_num_batched_tokens": CHUNK,
            "max_num_seqs": CHUNK,
        },
        (_Recorder.chunked,),
    ),
    "tight": ({}, (_Recorder.preempted,)),
    "tp2": ({}, (_Recorder.tensor_parallel,)),
}


def record(
    config: RunConfig,
    spec: AdapterSpec,
    model_dir: Path,
    tensors: Mapping[str, np.ndarray],
    samples: int,
    names: Sequence[str],
    timeout_s: float,
) -> list[Recording]:
    """All conditions of the named engines. The job of a process of its own; raises ActorFailed when
    an engine fails."""
    prepare_process(config)
    import vllm.v1.engine.llm_engine  # noqa: F401  once for all engines

    found = []
    for name in names:
        arguments = (name, config, spec, model_dir, tensors, samples)
        found += apart(f"vLLM engine {name}", _run, *arguments, timeout_s=timeout_s, start="fork")
    return found


def tensor_parallel(config: RunConfig) -> RunConfig:
    """The config of the engine tp2."""
    return with_settings(config, {"rollout": {"tp": 2}})


def _caches(model_dir: Path) -> int:
    """KV caches that share the blocks: where layers have sliding windows, vLLM makes groups of as
    many layers of one kind as there are of the rarer kind (`get_kv_cache_groups`)."""
    types = read_json(model_dir / "config.json").get("layer_types") or ()
    if "sliding_attention" not in types:
        return 1
    counts = Counter(types).values()
    return sum(-(-count // min(counts)) for count in counts)


def _run(
    name: str, config: RunConfig, spec, model_dir: Path, tensors, samples: int
) -> list[Recording]:
    """An engine's process: all its conditions."""
    changes, conditions = ENGINES[name]
    block = BLOCKS[spec.shape.family.attention]
    if name == "tp2":
        config = tensor_parallel(config)
    changes = changes | {"block_size": block}
    if name == "tight":
        changes |= {"num_gpu_blocks_override": _caches(model_dir) * TIGHT // block}
    started = time.perf_counter()
    recorder = _Recorder(config, spec, model_dir, tensors, samples, **changes)
    found = []
    for condition in conditions:
        found.append(condition(recorder))
        found[-1].seconds = time.perf_counter() - started
        started = time.perf_counter()
    return found
