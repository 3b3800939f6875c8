"""`lora-moe-rl serve`: a run's adapter versions, or a model, behind OpenAI's protocol."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.options import positive
from lora_moe_rl.endpoint.keys import key_of_variable
from lora_moe_rl.errors import CheckpointError, ConfigError, LoraMoeRlError, ModelError

if TYPE_CHECKING:
    from lora_moe_rl.adapters.spec import AdapterSpec
    from lora_moe_rl.endpoint.listening import Listening
    from lora_moe_rl.endpoint.rendering import Chats

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


@dataclass(frozen=True)
class Plan:
    """What is served: `versions` are whole adapters by version, none for the base alone.
    `template`: where the chat template comes from, in words."""

    config: RunConfig
    spec: AdapterSpec
    model_dir: Path
    versions: dict[int, dict[str, np.ndarray]]
    template: str

    def chats(self, calls: str) -> Chats:
        """What renders messages: with the tokenizer of the model and the template of the config."""
        from lora_moe_rl.endpoint.rendering import Chats
        from lora_moe_rl.models.tokenizer import load_tokenizer

        model = self.config.model
        tokenizer = load_tokenizer(self.model_dir, model.trust_remote_code, model.chat_template)
        return Chats(tokenizer, calls)


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
    from lora_moe_rl.endpoint.served_config import template_in_words, with_settings
    from lora_moe_rl.files.untrusted import read_json
    from lora_moe_rl.models.directory import resolve_model

    if options.base is not None:
        raise ConfigError(f"--base {options.base} has no effect: {options.source} is the base")
    _check_versions(options, of="a model")
    config = with_settings(RunConfig(model=options.source), options.settings, 1)
    try:
        model_dir = resolve_model(options.source, config.model.revision, named="SOURCE ")
    except ModelError as error:
        raise ModelError(f"{_nothing_at(options.source)}{error}") from error
    if not (model_dir / "config.json").exists():
        raise ModelError(
            f"{options.source} is nothing to serve: no run (it has no checkpoints/), no checkpoint "
            "(no manifest.json), no PEFT directory (no adapter_config.json) and no model (no "
            "config.json); give the directory of one of these"
        )
    shape = ModelShape.from_hf_config(read_json(model_dir / "config.json"))
    template = template_in_words(config, None)
    return Plan(config, AdapterSpec.build(shape, config.adapter), model_dir, {}, template)


def _nothing_at(source: str) -> str:
    """What to say first of a path that leads to nothing, although its folder is there."""
    path = Path(source).expanduser()
    if "/" not in source or path.exists() or not path.parent.is_dir():
        return ""
    near = get_close_matches(path.name, [one.name for one in path.parent.iterdir()], cutoff=0.5)
    what = f"{path.parent} has {', '.join(near)}" if near else f"{path.parent} has no such run"
    return f"there is no {source} here; {what}. Taken for a model: "


def _of_adapter(path: Path, options: argparse.Namespace) -> Plan:
    from lora_moe_rl.endpoint.served_config import template_in_words, trained_with, with_settings
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
    trained = trained_with(path, newest)
    config = with_settings(trained.config, options.settings, len(versions))
    return Plan(config, newest.spec, model_dir, versions, template_in_words(config, trained))


def _check_versions(options: argparse.Namespace, of: str) -> None:
    if options.versions is not None:
        raise ConfigError(f"--versions {options.versions} has no effect: SOURCE is {of}")


def _version_of(path: Path) -> int:
    """The adapter version that a checkpoint holds; 0 for a PEFT directory, which has none."""
    from lora_moe_rl.files import checkpoint

    if not (path / checkpoint.MANIFEST).is_file():
        return 0
    return checkpoint.read_manifest(path)["trainer"]["version"]


async def _serve(
    plan: Plan, listening: Listening, key: str | None, options: argparse.Namespace
) -> int:
    """Until a signal comes, or the engine fails, which is raised."""
    from lora_moe_rl.endpoint.admission import Admission
    from lora_moe_rl.endpoint.app import Endpoint
    from lora_moe_rl.endpoint.engine import Served, ServingEngine
    from lora_moe_rl.endpoint.owning import ROUTES
    from lora_moe_rl.endpoint.sessions import Sessions

    config, chats = plan.config, plan.chats(options.calls)
    print(f"chat template: {plan.template}; model.max_length={config.model.max_length}")
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
