"""`lora-moe-rl serve`: a run's adapter versions, or a model, behind OpenAI's protocol."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.options import positive
from lora_moe_rl.endpoint.keys import key_of_variable
from lora_moe_rl.errors import CheckpointError, ConfigError, LoraMoeRlError

if TYPE_CHECKING:
    from lora_moe_rl.adapters.spec import AdapterSpec
    from lora_moe_rl.endpoint.listening import Listening

ABOUT = """\
Serve a run's newest adapter versions and its base, or a model alone, by one rollout engine of this
machine: /v1/models, /v1/chat/completions, /v1/completions, /inference/v1/generate.

SOURCE is a run directory, a checkpoint, a PEFT directory, or a model (directory, hub name, tiny
model). Models are `policy` (the newest version), `policy@12` (version 12) and `base`.
"""
EPILOG = """\
examples:
  lora-moe-rl serve RUN
  lora-moe-rl serve RUN --versions 3 --port 9000 rollout.tp=2
  SERVE_KEY=… lora-moe-rl serve Qwen/Qwen3-30B-A3B --host 0.0.0.0 --key-env SERVE_KEY
"""
IDLE_S = 3600.0
VERSIONS = 2
# What a setting may set: SOURCE and options say all else.
READ = ("rollout.", "model.max_length", "model.chat_template", "model.revision",
        "model.trust_remote_code", "trainer.dtype", "trainer.fp8_forward")  # fmt: skip
# Of rollout.*, what is a run's: how it samples, and what it does about its engines.
OF_RUNS = ("engines", "least_engines", "gpus_per_engine", "max_response_tokens", "temperature",
           "start_timeout_s", "max_restarts", "silent_s", "max_silences")  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What is served: `versions` are whole adapters by version, none for the base alone."""

    config: RunConfig
    spec: AdapterSpec
    model_dir: Path
    versions: dict[int, dict[str, np.ndarray]]


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_intermixed_args(argv)
    key = owners_key(options)
    from lora_moe_rl.endpoint.listening import Listening

    listening = Listening(options.host, options.port, "--key-env" if key is None else None)
    try:
        plan = planned(options)
        return asyncio.run(_serve(plan, listening, key, options))
    finally:
        listening.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lora-moe-rl serve",
        description=ABOUT,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="SOURCE")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="as rollout.tp=2")
    parser.add_argument("--base", metavar="DIR", help="the base, where it is not where it was")
    parser.add_argument("--versions", type=positive, help="how many of a run's newest versions (2)")
    parser.add_argument("--host", default="127.0.0.1", help="the address it listens on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free (8000)")
    parser.add_argument(
        "--key-env", metavar="NAME", help="the environment variable that holds the key that is "
        "asked for; without one none is",
    )  # fmt: skip
    parser.add_argument(
        "--calls", default="json", help="how the model writes calls of tools, as environment.calls "
        "has it (json)",
    )  # fmt: skip
    parser.add_argument(
        "--running", type=positive, default=256, help="requests that are answered at a time (256)"
    )
    parser.add_argument(
        "--waiting", type=positive, default=4096, help="requests that may wait; more get 429 (4096)"
    )
    parser.add_argument(
        "--sessions", type=positive, default=10_000, help="sessions that may be open (10000)"
    )
    parser.add_argument("--traceback", action="store_true", help=argparse.SUPPRESS)
    return parser


def owners_key(options: argparse.Namespace) -> str | None:
    """None: no key is asked for. Raises ConfigError."""
    return None if options.key_env is None else key_of_variable(options.key_env, "--key-env ")


def planned(options: argparse.Namespace) -> Plan:
    """Raises a LoraMoeRlError for what cannot be served, before an engine starts."""
    path = Path(options.source).expanduser()
    is_adapter = any((path / name).exists() for name in ("checkpoints", "manifest.json",
                                                         "adapter_config.json"))  # fmt: skip
    return _of_adapter(path, options) if is_adapter else _of_model(options)


def _of_model(options: argparse.Namespace) -> Plan:
    from lora_moe_rl.adapters.spec import AdapterSpec, ModelShape
    from lora_moe_rl.files.untrusted import read_json
    from lora_moe_rl.models.directory import resolve_model

    if options.base is not None:
        raise ConfigError(f"--base {options.base} has no effect: {options.source} is the base")
    _check_versions(options, of="a model")
    config = _with_settings(RunConfig(model=options.source), options.settings, 1)
    model_dir = resolve_model(options.source, config.model.revision, named="SOURCE ")
    shape = ModelShape.from_hf_config(read_json(model_dir / "config.json"))
    return Plan(config, AdapterSpec.build(shape, config.adapter), model_dir, {})


def _of_adapter(path: Path, options: argparse.Namespace) -> Plan:
    from lora_moe_rl.config.recipes import load_config
    from lora_moe_rl.files import adapter_source, checkpoint
    from lora_moe_rl.models.directory import resolve_model

    given = resolve_model(options.base, named="--base ") if options.base else None
    newest = adapter_source.load(path, given)
    base = newest.config.model
    model_dir = given or resolve_model(str(base.path), base.revision)
    newest.check_base(model_dir)
    versions = {_version_of(newest.path): newest.tensors}
    if not (path / "checkpoints").is_dir():
        _check_versions(options, of="one adapter")
    else:
        older = [one for one in checkpoint.all_of(path / "checkpoints") if one < newest.path]
        for one in reversed(older):
            if len(versions) == (options.versions or VERSIONS):
                break
            try:
                found = adapter_source.load(one, given)
            except CheckpointError as error:
                print(f"left out: {error}", file=sys.stderr)
                continue
            if found.spec == newest.spec:
                versions[_version_of(one)] = found.tensors
            else:
                print(f"left out: {one} holds an adapter of other ranks", file=sys.stderr)
    saved = path / "config.yaml"
    config = load_config(str(saved)) if saved.is_file() else newest.config
    config = _with_settings(config, options.settings, len(versions))
    return Plan(config, newest.spec, model_dir, versions)


def _check_versions(options: argparse.Namespace, of: str) -> None:
    if options.versions is not None:
        raise ConfigError(f"--versions {options.versions} has no effect: SOURCE is {of}")


def _version_of(path: Path) -> int:
    """The adapter version that a checkpoint holds; 0 for a PEFT directory, which has none."""
    from lora_moe_rl.files import checkpoint

    if not (path / checkpoint.MANIFEST).is_file():
        return 0
    return checkpoint.read_manifest(path)["trainer"]["version"]


def _with_settings(config: RunConfig, settings: list[str], slots: int) -> RunConfig:
    """For one engine with so many slots, and for the one rank that fills them. Raises ConfigError
    for an adapter that no engine serves beside its base."""
    from lora_moe_rl.config import TrainerConfig
    from lora_moe_rl.config.overrides import override, parse_arguments
    from lora_moe_rl.files.unchanged import flat

    for key in (key for layer in parse_arguments(settings) for key in flat(layer)):
        if not key.startswith(READ) or key.removeprefix("rollout.") in OF_RUNS:
            read = ", ".join(f"{one}*" if one.endswith(".") else one for one in READ)
            raise ConfigError(
                f"serve does not read {key}; it reads {read} but for {', '.join(OF_RUNS)}: how a "
                "client samples stands in its requests, and there is one engine"
            )
    config = override(config, settings)
    if config.refit.mode == "merged":
        raise ConfigError(
            "refit.mode=merged: this adapter is served merged into its base alone; write that with "
            "`lora-moe-rl export --to merged`, and serve it as a model"
        )
    one_rank = TrainerConfig(dtype=config.trainer.dtype)
    refit = config.refit.model_copy(update={"slots": slots})
    rollout = config.rollout.model_copy(update={"engines": 1})
    return config.model_copy(update={"trainer": one_rank, "refit": refit, "rollout": rollout})


async def _serve(
    plan: Plan, listening: Listening, key: str | None, options: argparse.Namespace
) -> int:
    """Until a signal comes, or the engine fails, which is raised."""
    from lora_moe_rl.endpoint.admission import Admission
    from lora_moe_rl.endpoint.app import Endpoint
    from lora_moe_rl.endpoint.engine import Served, ServingEngine
    from lora_moe_rl.endpoint.owning import ROUTES
    from lora_moe_rl.endpoint.rendering import Chats
    from lora_moe_rl.endpoint.sessions import Sessions
    from lora_moe_rl.models.tokenizer import load_tokenizer

    config, model = plan.config, plan.config.model
    tokenizer = load_tokenizer(plan.model_dir, model.trust_remote_code, model.chat_template)
    chats = Chats(tokenizer, options.calls)
    deaths: list[LoraMoeRlError] = []

    def died(error: LoraMoeRlError) -> None:
        deaths.append(error)
        listening.stop()

    engine = ServingEngine(config, str(plan.model_dir), plan.spec, 0)
    facts = await engine.start()
    try:
        if plan.versions:
            await engine.take(config, plan.versions, facts["dtype"])
        served = Served(engine, config, died)
        sessions = Sessions(key, served, options.sessions, IDLE_S)
        admission = Admission(options.running, options.waiting)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, listening.stop)
        print(f"{listening.url} serves {', '.join(served.models())}", flush=True)
        await listening.serve(Endpoint(sessions, chats, admission, ROUTES).app())
    finally:
        await engine.shutdown()
    if deaths:
        raise deaths[0]
    return 0
