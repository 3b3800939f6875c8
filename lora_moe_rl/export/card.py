"""The model card of what is exported: README.md beside the weights, as model hubs show it.

It is made from the adapter's own sites and, where the adapter is of a run, from the run's
settings.json (or config.yaml), metrics.jsonl and versions.json. Paths of the machine are cut to
their last part, since a card is published.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from lora_moe_rl import __version__
from lora_moe_rl.adapters.peft_config import common, completed
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import with_settings
from lora_moe_rl.data.rows import is_hub
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.export import chat_template
from lora_moe_rl.export.run_settings import settings_at
from lora_moe_rl.files.checkpoint import step_of
from lora_moe_rl.files.run_dir import METRICS
from lora_moe_rl.files.versions_file import VERSIONS

FILE = "README.md"
What = Literal["adapter", "critic", "merged"]
_IS = {
    "adapter": "A LoRA adapter of `{}`",
    "critic": "The critic of `{}`",
    "merged": "`{}` with a LoRA adapter merged into it",
}


def text(
    spec: AdapterSpec,
    base: str,
    run: Path | None,
    checkpoint: Path,
    what: What = "adapter",
    own_template: bool = False,
) -> str:
    """`base` as the adapter's config names it, `run` the one that the adapter in `checkpoint` is
    of. `own_template`: whether the run's chat template is beside the card."""
    parts = [
        _head(base, what),
        f"# {run.resolve().name if run else 'Adapter'} ({Path(base).name})",
        f"{_IS[what].format(shown(base))}, written by lora_moe_rl {__version__}.",
    ]
    if own_template:
        parts.append(
            f"It was trained with a chat template of its own, `{chat_template.FILE}`, in the place "
            "of the base's."
        )
    scale = None if what == "merged" else common(completed(spec), "scale")
    parts += [
        "## Adapter\n\n" + _table(["module", "layers", "rank", "scale"], _modules(spec, scale)),
        f"{len(spec.sites):,} sites, {spec.num_parameters:,} parameters, float32.",
    ]
    if scale is not None and any(site.scale != scale for site in spec):
        parts.append(
            "The scale is `lora_alpha / r` of `adapter_config.json`, the same for every module; a "
            "factor that it was trained with besides is in its B."
        )
    if what == "merged":
        parts.append("What rounding left of it in the merged weights is in `merge.json`.")
    if run is not None:
        parts += [_training(run, checkpoint), *_figures(run, checkpoint)]
        parts.append(_versions(run, checkpoint))
    return "\n\n".join(parts) + "\n"


def _training(run: Path, checkpoint: Path) -> str:
    """The settings; why they cannot be read, where a plug-in of the run is gone."""
    try:
        config = with_settings(RunConfig(), settings_at(run, checkpoint))
    except ConfigError as error:
        print(f"warning: the card has no settings of the run: {error}", file=sys.stderr)
        return "## Training\n\nThe settings of the run could not be read."
    return "## Training\n\n" + _table(["setting", "value"], _settings(config))


def _head(base: str, what: What) -> str:
    """What a hub reads; it finds a base by its hub name alone."""
    known: dict[str, Any] = {"library_name": "peft", "tags": ["lora", "lora_moe_rl"]}
    if what == "merged":
        known["library_name"] = "transformers"
    if shown(base) == base and base.count("/") == 1:
        known["base_model"] = base
    return f"---\n{yaml.safe_dump(known)}---"


def shown(name: str) -> str:
    """A file or directory of the machine by its last part; a name of the hub as it is."""
    local = not is_hub(name) or Path(name).exists()
    return Path(name).name if local else name


def _modules(spec: AdapterSpec, written: float | None) -> list[list[str]]:
    """A row for each module and rank, with the layers that have it. `written`: the scale that the
    file has; None where there is no file of them."""
    layers: dict[tuple[str, int, float], set[int]] = {}
    for site in spec:
        scale = site.scale if written is None else written
        layers.setdefault((site.module, site.rank, scale), set()).add(site.layer)
    return [
        [module, str(len(found)), str(rank), f"{scale:g}"]
        for (module, rank, scale), found in layers.items()
    ]


def _settings(config: RunConfig) -> list[list[str]]:
    rows = [["algorithm", config.algorithm.name]]
    for name, source in config.sources().items():
        rows.append([f"data {name}".strip(), _function(source.path or source.generator or "-")])
    for name, functions in config.rewards().items():
        every = ", ".join(_function(one.function) for one in functions if one.function)
        rows.append([f"reward {name}".strip(), every or "-"])
    rows += [
        ["prompts a step", f"{config.algorithm.prompts_per_step}"],
        ["samples a prompt", f"{config.algorithm.group_size}"],
        ["learning rate", f"{config.trainer.lr:g}"],
        ["seed", f"{config.seed}"],
    ]
    return rows


def _function(name: str) -> str:
    """`/home/me/mine.py:reward` as `mine.py:reward`."""
    path, colon, function = name.partition(":")
    return shown(path) + colon + function


def _versions(run: Path, checkpoint: Path) -> str:
    """The versions of what the run was trained with, by its own record."""
    found = VERSIONS.at(run, step_of(checkpoint))
    if found is None:
        return "## Versions\n\nThe run has no record of what it was trained with."
    return "## Versions\n\n" + _table(["package", "version"], [*map(list, found.items())])


def _checks(records: Sequence[dict[str, Any]]) -> list[str]:
    """What every step of a run is checked for: the worst of these steps. Nothing where nothing was
    sampled."""
    from lora_moe_rl.telemetry import names

    worst: dict[str, tuple[str, Callable[[list[float]], float]]] = {
        names.MISMATCH_KL: ("KL of engine and trainer, the largest", max),
        names.MISMATCH_LARGEST: ("logprob of a token, the largest difference", max),
        names.COVERAGE: ("share of tokens with routes, the smallest", min),
        names.AUDITED: ("routes compared with those that were used, in all", sum),
    }
    cells = []
    for name, (what, of) in worst.items():
        if values := [value for one in records if (value := one.get(name)) is not None]:
            cells.append([f"`{name}`", what, f"{of(values):.4g}", f"{len(values)}"])
    if not cells:
        return []
    return ["## Checks in the run\n\n" + _table(["metric", "of", "value", "steps"], cells)]


def _figures(run: Path, checkpoint: Path) -> list[str]:
    """First and last steps up to the checkpoint, and its evaluation, if there was one."""
    from lora_moe_rl.telemetry import names
    from lora_moe_rl.telemetry.metrics import read_evaluations, read_steps

    step = step_of(checkpoint)
    records = [record for record in read_steps(run / METRICS) if record["step"] <= step]
    if not records:
        return []
    found = [f"## After step {step}\n\n" + _figures_table(records)]
    own = [record for record in read_evaluations(run / METRICS) if record["step"] == step]
    for record in own[-1:]:
        kept = {
            key: value
            for key, value in record.items()
            if key.startswith("eval/") and key not in (names.EVAL_STEP, names.EVAL_SECONDS)
        }
        cells = [[key, "-" if value is None else f"{value:.4g}"] for key, value in kept.items()]
        found.append("## Evaluation\n\n" + _table(["metric", "value"], cells))
    return found + _checks(records)


def _figures_table(records: list[dict[str, Any]]) -> str:
    """One column where the first steps are the last ones too."""
    from lora_moe_rl.telemetry.report import rows, spans

    first, last = spans(records)
    if first == last:
        return _table(["", f"steps {first}"], [[label, over] for label, *_, over in rows(records)])
    return _table(["", f"steps {first}", f"steps {last}", "over all"], rows(records))


def _table(heading: Sequence[str], found: Sequence[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *found]
    return "\n".join(
        "| " + " | ".join(c.replace("|", r"\|") for c in line) + " |" for line in lines
    )
