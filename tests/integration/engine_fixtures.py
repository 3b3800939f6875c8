"""One real vLLM engine a shape, shared by all tests, and the Hugging Face model it must equal."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import hf
import host_cuda
import numpy as np
import pytest
import ray
import torch
from refit_ranks import make_layouts, make_senders

from lora_moe_rl.adapters.families import ModelShape, hf_path
from lora_moe_rl.adapters.spec import AdapterSpec, Site
from lora_moe_rl.cluster.ray_start import local_ray
from lora_moe_rl.config import RunConfig, TrainerConfig
from lora_moe_rl.refit.parts import SentPart
from lora_moe_rl.refit.plan import EngineLayout
from lora_moe_rl.refit.sender import Sender
from lora_moe_rl.rollout.facts import slot_rank
from lora_moe_rl.router_replay.table import RouteTable
from lora_moe_rl.tiny import shapes
from lora_moe_rl.tiny.tokenizer import make_tokenizer
from lora_moe_rl.verify.engine import FilesEngine
from lora_moe_rl.verify.replay_reference import on_choice

ONE_RANK = TrainerConfig()
Tensors = dict[str, np.ndarray]
HERE = Path(__file__).parent
# Of an engine's actor, which finds what tests import.
IMPORTED = os.pathsep.join([host_cuda.SITE, str(HERE), str(HERE.parent / "helpers")])
ACTOR = {
    "num_cpus": 1,
    "num_gpus": int(host_cuda.here()),
    "runtime_env": {"env_vars": {"PYTHONPATH": IMPORTED}},
}


def hf_name(shape: ModelShape, site: Site) -> str:
    return f"model.layers.{site.layer}.{hf_path(shape, site.module)}"


class EngineWithDisk(FilesEngine):
    """Can also score under an adapter that vLLM's own loader reads from a PEFT directory, and take
    adapters of another form, or refit settings, than those it was started for."""

    def use(self, spec: AdapterSpec) -> None:
        self.spec = spec

    def use_refit(self, **settings: Any) -> None:
        refit = self.config.refit.model_copy(update=settings)
        self.config = self.config.model_copy(update={"refit": refit})

    async def score_directory(self, sequences: list[list[int]], directory: str):
        while len(self.receipts) >= self.config.refit.slots:
            await self.drop(min(self.receipts))  # vLLM would evict a version behind our back
        found = await self.score_files(sequences, directory)
        await self.unload_files()
        await self.prepare_refit(self.layouts)  # the slot holds what a refit would not overwrite
        return found


@dataclass
class EngineUnderTest:
    """An engine in a Ray actor. Versions only grow: `new_version` hands them out."""

    actor: Any
    config: RunConfig
    spec: AdapterSpec
    model: torch.nn.Module
    versions: Iterator[int] = field(default_factory=itertools.count)
    prepared: list[Any] = field(default_factory=list)
    senders: list[Sender] = field(default_factory=list)

    def new_version(self, tensors: Tensors) -> int:
        version = next(self.versions)
        self.publish(version, tensors)
        return version

    def publish(self, version: int, tensors: Tensors, trainer: TrainerConfig = ONE_RANK):
        return self.publish_parts(version, self.send(version, tensors, trainer)[1])

    def publish_parts(self, version: int, sent: list[SentPart]):
        return ray.get(self.actor.publish.remote(version, *sent))

    def send(
        self, version: int, tensors: Tensors, trainer: TrainerConfig = ONE_RANK
    ) -> tuple[list[Sender], list[SentPart]]:
        """The parts of the trainer ranks of a layout, and who holds their memory."""
        engine = EngineLayout.of(self.config.rollout, slot_rank(self.spec))
        layouts = make_layouts(self.spec, trainer, engine)
        if self.prepared != [layouts]:
            ray.get(self.actor.prepare_refit.remote(layouts))
            self.prepared[:] = [layouts]
        senders = make_senders(layouts, self.spec, tensors, trainer)
        self.senders[:] = [*self.senders[-20:], *senders]  # a part goes with its sender
        return senders, [sender.send(version) for sender in senders]

    def generate(self, prompts: list[list[int]], n: int, version: int, seed: int = 0):
        """`n` samples of each prompt, all asked for at once, and one table of their routes."""
        answers = ray.get(self.sample_refs(prompts, n, version, seed))
        table = RouteTable.concat([sent.table() for _, sent in answers])
        return [sample for samples, _ in answers for sample in samples], table

    def sample_refs(self, prompts: list[list[int]], n: int, version: int, seed: int = 0):
        """References to (samples, routes) of each prompt; samples of two prompts share no seed."""
        return [
            self.actor.sample.remote(prompt, n, version, 1000 * (seed + place))
            for place, prompt in enumerate(prompts)
        ]

    def score(self, sequences: list[list[int]], version: int | None):
        return ray.get(self.actor.score.options(num_returns=2).remote(sequences, version))

    def score_directory(self, sequences: list[list[int]], directory: Path):
        call = self.actor.score_directory.options(num_returns=2)
        return ray.get(call.remote(sequences, str(directory)))

    def random_adapter(self, seed: int, modules: tuple[str, ...] | None = None) -> Tensors:
        """Large enough to change every token's logprobs; B is zero outside `modules`."""
        generator = np.random.default_rng(seed)
        tensors = {}
        for name, shape in self.spec.tensor_shapes.items():
            values = generator.standard_normal(shape, dtype=np.float32)
            site = self.spec.by_name[name[:-2]]
            kept = modules is None or site.module in modules
            tensors[name] = values * (shape[-1] ** -0.5 if name.endswith("A") else 0.03 * kept)
        return tensors

    @contextlib.contextmanager
    def of_form(self, **adapter: Any) -> Iterator[EngineUnderTest]:
        """The same engine with adapters of another form."""
        config = RunConfig(adapter=adapter)
        spec = AdapterSpec.build(self.spec.shape, config.adapter)
        assert slot_rank(spec) <= slot_rank(self.spec)
        ray.get(self.actor.use.remote(spec))
        try:
            yield replace(self, spec=spec)
        finally:
            ray.get(self.actor.use.remote(self.spec))

    @contextlib.contextmanager
    def merged(self, tensors: Tensors | None) -> Iterator[torch.nn.Module]:
        """The Hugging Face model with scale * B A added to its weights by hand."""
        saved = {name: value.clone() for name, value in self.model.state_dict().items()}
        if tensors is not None:
            hf.merge(self.model, self.spec, tensors)
        try:
            yield self.model
        finally:
            self.model.load_state_dict(saved)


def reference(
    model: torch.nn.Module, spec: AdapterSpec, token_ids: list[int], temperature: float = 1.0
):
    """Hugging Face's logprobs `[L - 1]` and sorted routes `[L - 1, moe_layers, top_k]`; of a dense
    model there are none."""
    routes: dict[int, torch.Tensor] = {}
    hooks = [
        on_choice(
            model.get_submodule(f"model.layers.{layer}.mlp"),
            lambda _, args, layer=layer: routes.__setitem__(layer, args[1]),
        )
        for layer in spec.shape.moe_layers
    ]
    try:
        with torch.no_grad():
            logits = model(torch.tensor([token_ids])).logits[0, :-1] / temperature
    finally:
        for hook in hooks:
            hook.remove()
    chosen = torch.tensor(token_ids[1:]).unsqueeze(1)
    logprobs = logits.log_softmax(-1).gather(1, chosen).squeeze(1).numpy()
    if not routes:
        return logprobs, np.zeros((len(chosen), 0, 0))
    table = torch.stack([routes[layer][:-1] for layer in spec.shape.moe_layers], dim=1)
    return logprobs, table.sort(-1).values.numpy()


def save_random_model(name: str, folder: Path) -> torch.nn.Module:
    """A tiny model with random weights, as a Hugging Face directory."""
    torch.manual_seed(0)
    model = shapes.build_model(name).eval()
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | shapes.EXTRA_CONFIG[name]))
    return model


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    local_ray(2)
    yield
    ray.shutdown()


@pytest.fixture(scope="session", params=["qwen3_moe", "deepseek_v3"])
def engine(request, ray_session, tmp_path_factory) -> Iterator[EngineUnderTest]:
    folder = tmp_path_factory.mktemp(request.param)
    with start_engine(save_random_model(request.param, folder), folder) as running:
        yield running


def of_folder(
    folder: Path, max_length: int = 256, **settings: Any
) -> tuple[RunConfig, AdapterSpec]:
    """What an engine is started with."""
    settings = {
        "rollout": {"max_response_tokens": 24, "stop_token_ids": tuple(range(16))},
        **settings,
    }
    if host_cuda.here():
        settings["trainer"] = {"dtype": "float32"} | settings.get("trainer", {})
        settings["rollout"] = host_cuda.ROLLOUT | settings["rollout"]
    shape = ModelShape.from_hf_config(json.loads((folder / "config.json").read_text()))
    of_experts = {"expert_rank": 4, "expert_alpha": 4} if shape.moe_layers else {}
    adapter = {"rank": 6, "alpha": 12} | of_experts | settings.pop("adapter", {})
    config = RunConfig(
        model={"path": str(folder), "max_length": max_length}, adapter=adapter, **settings
    )
    return config, AdapterSpec.build(shape, config.adapter)


@contextlib.contextmanager
def start_engine(
    model: torch.nn.Module,
    folder: Path,
    engine_class: type[EngineWithDisk] = EngineWithDisk,
    max_length: int = 256,
    **settings: Any,
) -> Iterator[EngineUnderTest]:
    """An engine that serves `folder`, where `model` was saved. Ray must be running."""
    config, spec = of_folder(folder, max_length, **settings)
    log = str(folder / "engine.log")
    actor_class = ray.remote(**ACTOR)(engine_class)
    actor = actor_class.remote(config, str(folder), spec, 0, log)
    try:
        ray.get(actor.start.remote(), timeout=240)
    except Exception:
        if Path(log).exists():
            print(Path(log).read_text()[-5000:])
        raise
    yield EngineUnderTest(actor, config, spec, model)
    ray.get(actor.shutdown.remote(), timeout=60)
    ray.kill(actor)
