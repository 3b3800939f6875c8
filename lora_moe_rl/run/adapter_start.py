"""What a run starts from when it is not its own fresh adapter: another's, or one of other ranks."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from lora_moe_rl import algorithms
from lora_moe_rl.adapters.resize import Change, fit, fresh
from lora_moe_rl.adapters.sharding import fused_with
from lora_moe_rl.adapters.shards import assemble
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import AdapterError, RunDirError
from lora_moe_rl.export import chat_template
from lora_moe_rl.export.run_settings import run_of
from lora_moe_rl.files.adapter_settings import settings_of
from lora_moe_rl.files.adapter_source import checkpoint_shards, checkpoint_spec, load
from lora_moe_rl.files.checkpoint import Found
from lora_moe_rl.files.trainer_state import BEGAN, CRITIC, KINDS, MOMENTS, file_name, files, key
from lora_moe_rl.models.tokenizer import load_tokenizer


@dataclass(frozen=True)
class Start:
    """`tensors`: of every site of the run. `notes`: what the log should say. `digest`: of the
    adapter as it was read, before it was made to fit. `template`: the chat template that it was
    trained with, None for the tokenizer's own; `template_file`: where that is a file."""

    tensors: dict[str, np.ndarray]
    notes: list[str]
    digest: str
    template: str | None = None
    template_file: Path | None = None


def init_from(config: RunConfig, spec: AdapterSpec, model_dir: Path) -> Start:
    """The adapter of `adapter.init_from` as the run's own.

    Raises AdapterError when it has sites that the run does not adapt, and when its ranks are others
    and adapter.resize is not set; and what `export.source.load` raises.
    """
    path = Path(str(config.adapter.init_from))
    found = load(path, model_dir)
    if lost := [site.name for site in found.spec if site.name not in spec.by_name]:
        raise AdapterError(
            f"adapter.init_from={path} has adapters that this run has not, and which would be "
            f"lost: {_some(lost)}. These settings train it as it is: "
            f"{' '.join(settings_of(found.spec))}"
        )
    _require_resize(config, found.spec, spec, f"adapter.init_from={path}")
    tensors, changes = fit(found.spec, found.tensors, spec, config.seed)
    notes = [f"starting from {path}: {len(found.spec.sites)} sites", *_notes(changes)]
    missing = [site for site in spec if site.name not in found.spec.by_name]
    for site in missing:
        tensors |= fresh(site, config.seed)
    if missing:
        notes.append(f"new adapters, at zero, on {_some([site.name for site in missing])}")
    digest, source = digest_of(found.spec, found.tensors), run_of(path, found.path)
    template = chat_template.of_adapter(source, found.path)
    file = path / chat_template.FILE if source is None and template is not None else None
    return Start(tensors, notes, digest, template, file)


def other_template(start: Start, config: RunConfig, model_dir: Path, in_use: str | None) -> str:
    """A warning that the adapter was trained with another chat template than prompts are rendered
    with, which is `in_use`; '' where it was not."""
    before = start.template
    if before is None and config.model.chat_template is not None:
        before = load_tokenizer(model_dir, config.model.trust_remote_code).chat_template
    elif before is None:
        return ""
    if before == in_use:
        return ""
    if start.template is None:
        which, way_out = "the tokenizer's own chat template", "leave model.chat_template out"
    else:
        which, way_out = "a chat template of its own", "set model.chat_template as that run had it"
        if start.template_file is not None:
            way_out = f"set model.chat_template_file={start.template_file}"
    return (
        f"adapter.init_from={config.adapter.init_from} was trained with {which}, and prompts are "
        f"rendered with another: it meets other tokens than it has learned from; to go on with the "
        f"same, {way_out}"
    )


def digest_of(spec: AdapterSpec, tensors: Mapping[str, np.ndarray]) -> str:
    """xxh3-128 of an adapter: its sites with their scales, and all its numbers."""
    found = xxhash.xxh3_128()
    for site in spec:
        found.update(f"{site.name}|{site.scale!r}|".encode())
        for name in (f"{site.name}.A", f"{site.name}.B"):
            found.update(f"{tensors[name].shape}".encode())
            found.update(np.ascontiguousarray(tensors[name]))
    return found.hexdigest()


def other_ranks(found: Found, config: RunConfig, spec: AdapterSpec) -> AdapterSpec | None:
    """The adapter that a checkpoint holds, if its ranks or scales are not those of the run.

    Raises RunDirError when adapter.resize is not set, for what no resizing can change, and for a
    checkpoint without the critic that the run has.
    """
    critic = algorithms.make(config).critic is not None
    if critic and found.path is not None and not files(found.path, CRITIC):
        raise RunDirError(
            f"{found.path} holds no critic, and algorithm={config.algorithm.name} trains one; "
            "start a run of its own from that adapter with adapter.init_from, or keep the algorithm"
        )
    old = checkpoint_spec(found.metadata)
    if old == spec:
        return None
    if [site.name for site in old] != [site.name for site in spec]:
        raise RunDirError(
            f"{found.path} has adapters on other modules than adapter.targets="
            f"{','.join(config.adapter.targets)}; a resumed run keeps its modules"
        )
    if any(site.frozen_rank for site in (*old, *spec)):
        raise RunDirError(
            f"{found.path}: ranks of an adapter that began at its base (adapter.init) cannot be "
            "changed: its frozen half is the base's own of that rank. Export the adapter, resize "
            "it, and start a run from it with adapter.init_from"
        )
    if critic:
        raise RunDirError(
            f"{found.path}: the critic of algorithm={config.algorithm.name} keeps its ranks, which "
            f"are the policy's: {' '.join(settings_of(old))}"
        )
    if any(old.by_name[site.name].shared != site.shared for site in spec):
        raise RunDirError(f"{found.path}: a resumed run keeps its adapter.expert_layout")
    _require_resize(config, old, spec, str(found.path), scales=True)
    return old


def lost_critic(found: Found, config: RunConfig) -> str:
    """A warning that a checkpoint holds a critic which the run would lose; '' where it does not."""
    if found.path is None or algorithms.make(config).critic or not files(found.path, CRITIC):
        return ""
    return (
        f"{found.path} holds a critic, and algorithm={config.algorithm.name} trains none: it is "
        "not in the checkpoints to come, from which no algorithm with a critic can go on. To keep "
        "it, keep the algorithm, or go on in a directory of its own (--resume-from)"
    )


def _require_resize(
    config: RunConfig, old: AdapterSpec, spec: AdapterSpec, where: str, scales: bool = False
) -> None:
    """`scales`: Adam's moments go on, which are of gradients at one scale."""
    if config.adapter.resize:
        return
    pairs = [(old.by_name[site.name], site) for site in spec if site.name in old.by_name]
    what = "ranks"
    differ = [f"{a.name} {a.rank} -> {b.rank}" for a, b in pairs if a.rank != b.rank]
    if not differ and scales:
        what = "scales (alpha / rank)"
        differ = [f"{a.name} {a.scale:g} -> {b.scale:g}" for a, b in pairs if a.scale != b.scale]
    if differ:
        raise AdapterError(
            f"{where} has other {what} than this run: {_some(differ)}. With adapter.resize=true "
            f"they are changed, ranks by an SVD of B A (exact when growing, the best approximation "
            f"when shrinking), and Adam begins anew for them; or keep them: "
            f"{' '.join(settings_of(old))}"
        )


@contextmanager
def resized(found: Found, old: AdapterSpec, spec: AdapterSpec, seed: int) -> Iterator[Any]:
    """Yields (directory, notes): the trainer state of a checkpoint, at the ranks of `spec`.

    Adam begins anew for sites that changed, and those that are trained as one tensor with them. The
    directory is gone afterwards.
    """
    assert found.path is not None
    directory = found.path.parent / f"tmp-resized-{found.path.name}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    try:
        yield directory, _write_resized(directory, found, old, spec, seed)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _write_resized(
    directory: Path, found: Found, old: AdapterSpec, spec: AdapterSpec, seed: int
) -> list[str]:
    from safetensors.numpy import save_file

    source, steps = found.path, found.metadata["trainer"]["optimizer_steps"]
    assert source is not None
    tensors = assemble(old.tensor_shapes, checkpoint_shards(source))
    tensors, changes = fit(old, tensors, spec, seed)
    changed = _begin_anew(old, spec)
    adapter = {key("adapter", n, (0,) * value.ndim): value for n, value in tensors.items()}
    save_file(adapter, directory / file_name(0))
    del tensors, adapter
    began = {shard.name: shard.data for shard in checkpoint_shards(source, BEGAN)}
    began |= dict.fromkeys(changed, np.array([steps]))
    began = {key(BEGAN, name, (0,)): value for name, value in began.items()}
    save_file(began, directory / file_name(len(KINDS)))
    for number, kind in enumerate(MOMENTS, start=1):
        save_file(_moments(kind, source, spec, changed), directory / file_name(number))
    kept = len(spec.sites) - len(changed)
    return [
        *_notes(changes),
        f"Adam begins anew for {len(changed)} sites, {kept} keep their moments",
    ]


def _begin_anew(old: AdapterSpec, spec: AdapterSpec) -> set[str]:
    """The sites whose moments cannot be kept. Adam counts the steps of a tensor that it trains."""
    changed = {site.name for site in spec if site != old.by_name[site.name]}
    return {
        site.name
        for site in spec
        if not changed.isdisjoint(f"layers.{site.layer}.{m}" for m in fused_with(site.module))
    }


def _moments(kind: str, source: Path, spec: AdapterSpec, changed: set[str]):
    state = {
        key(kind, shard.name, shard.start): shard.data
        for shard in checkpoint_shards(source, kind)
        if shard.name.rpartition(".")[0] not in changed
    }
    for name, shape in spec.tensor_shapes.items():
        if name.rpartition(".")[0] in changed:
            state[key(kind, name, (0,) * len(shape))] = np.zeros(shape, np.float32)
    return state


def _notes(changes: list[Change]) -> list[str]:
    if not changes:
        return []
    worst = max(changes, key=lambda change: change.relative)
    shrunk = sum(change.after < change.before for change in changes)
    return [
        f"resized {len(changes)} sites, {shrunk} of them to a lower rank; the most that one lost "
        f"of its ‖ΔW‖ is {worst.relative:.2e} ({worst.site}, rank {worst.before} -> {worst.after})"
    ]


def _some(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
