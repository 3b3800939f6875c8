"""The settings of `adapter` under which a run trains a given adapter as it is."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping

from lora_moe_rl.adapters.spec import AdapterSpec


def settings_of(spec: AdapterSpec) -> list[str]:
    """The settings as `key=value` words: targets, ranks and alphas; modules that differ are in
    patterns."""
    modules = dict.fromkeys(site.module for site in spec)
    rank = Counter(site.rank for site in spec).most_common(1)[0][0]
    alpha = Counter(site.scale * site.rank for site in spec).most_common(1)[0][0]
    ranks, alphas = {}, {}
    for module in modules:
        sites = [site for site in spec if site.module == module]
        for patterns, usual, values in (
            (ranks, rank, {site.layer: site.rank for site in sites}),
            (alphas, alpha, {site.layer: site.scale * site.rank for site in sites}),
        ):
            for value, layers in _by_value(values).items():
                if value == usual:
                    continue
                if len(layers) == len(sites):
                    patterns[module] = value
                else:
                    patterns |= {f"layers.{layer}.{module}": value for layer in layers}
    words = [
        f"adapter.targets={','.join(modules)}",
        f"adapter.rank={rank}",
        f"adapter.alpha={alpha:g}" if float(f"{alpha:g}") == alpha else f"adapter.alpha={alpha!r}",
    ]
    if any(site.shared for site in spec):
        words.append("adapter.expert_layout=shared_outer")
    if ranks:
        words.append(f"adapter.rank_pattern='{json.dumps(ranks)}'")
    if alphas:
        words.append(f"adapter.alpha_pattern='{json.dumps(alphas)}'")
    return words


def _by_value(values: Mapping[int, float]) -> dict[float, list[int]]:
    grouped: dict[float, list[int]] = {}
    for layer, value in values.items():
        grouped.setdefault(value, []).append(layer)
    return grouped
