"""What is in an adapter: sizes and norms, as data, as a table and as a picture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from lora_moe_rl.adapters.resize import squared_norms
from lora_moe_rl.adapters.spec import Site
from lora_moe_rl.files.adapter_source import Source

Norms = dict[str, Any]


def inspect(source: Source) -> Norms:
    """JSON: of each site its rank, scale and norms ||scale * B A|| (Frobenius), of each expert too.

    Norms come from the factors; B A is never formed.
    """
    sites = {}
    for site in source.spec:
        A, B = (source.tensors[f"{site.name}.{matrix}"] for matrix in "AB")
        squares = np.atleast_1d(squared_norms(A, B))
        norms = site.scale * np.sqrt(squares)
        sites[site.name] = {
            "rank": site.rank,
            "scale": site.scale,
            "parameters": A.size + B.size,
            "norm": site.scale * math.sqrt(float(squares.sum())),
            "of_expert": None if site.num_experts is None else norms.tolist(),
            "A": float(np.linalg.norm(A)),
            "B": float(np.linalg.norm(B)),
        }
    return {
        "source": str(source.path),
        "base": source.config.model.path,
        "architecture": source.spec.shape.architecture,
        "parameters": source.spec.num_parameters,
        "bytes_float32": 4 * source.spec.num_parameters,
        "sites": sites,
    }


def print_report(source: Source, report: Norms) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    console = Console(highlight=False, emoji=False, markup=False, soft_wrap=True)
    spec = source.spec
    console.print(
        f"{source.path}: {len(spec.sites)} sites of {spec.shape.architecture}, "
        f"{spec.num_parameters:,} parameters, {report['bytes_float32'] / 1e6:.1f} MB in float32"
    )
    table = Table(
        Column("module", no_wrap=True),
        "layers",
        "experts",
        "rank",
        "scale",
        "parameters",
        "‖ΔW‖ by layer",
    )
    modules: dict[str, list[Site]] = {}
    for site in spec:
        modules.setdefault(site.module, []).append(site)
    for module, sites in modules.items():
        found = [report["sites"][site.name] for site in sites]
        norms = [one["norm"] for one in found]
        table.add_row(
            module,
            str(len(sites)),
            str(sites[0].num_experts or "–"),
            _range([site.rank for site in sites]),
            _range([site.scale for site in sites]),
            f"{sum(one['parameters'] for one in found):,}",
            f"{min(norms):.3g} – {max(norms):.3g}" if len(norms) > 1 else f"{norms[0]:.3g}",
        )
    console.print(table)
    idle = [name for name, one in report["sites"].items() if one["norm"] == 0]
    if idle:
        console.print(f"{len(idle)} sites change nothing (B A is zero): {', '.join(idle[:6])}")


def _range(values: list[Any]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g}–{high:g}"


def heat_map(source: Source, report: Norms, path: Path) -> None:
    """A PNG: ‖ΔW‖ by layer and module, and of routed experts by layer and expert."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    spec, sites = source.spec, report["sites"]
    modules = list(dict.fromkeys(site.module for site in spec))
    layers = range(spec.shape.num_layers)
    grid = np.array([[_norm(sites, layer, m, "norm", np.nan) for m in modules] for layer in layers])
    expert_layers = sorted({site.layer for site in spec if site.num_experts is not None})
    columns = 2 if expert_layers else 1
    figure, axes = pyplot.subplots(
        1, columns, figsize=(6 * columns, 2 + 0.22 * len(layers)), squeeze=False
    )
    _draw(figure, axes[0][0], grid, "‖ΔW‖ by module")
    axes[0][0].set_xticks(range(len(modules)), modules, rotation=90)
    if expert_layers:
        _draw(figure, axes[0][1], _by_expert(spec, sites, expert_layers), "‖ΔW‖ by routed expert")
        axes[0][1].set_yticks(range(len(expert_layers)), [str(layer) for layer in expert_layers])
        axes[0][1].set_xlabel("expert")
    figure.tight_layout()
    with open(path, "wb") as file:  # with the name as it is, whatever its end
        figure.savefig(file, dpi=110, format="png")
    pyplot.close(figure)


def _draw(figure, axis, grid: np.ndarray, title: str) -> None:
    image = axis.imshow(grid, aspect="auto", interpolation="nearest")
    axis.set_title(title)
    axis.set_ylabel("layer")
    figure.colorbar(image, ax=axis)


def _norm(sites: dict[str, Any], layer: int, module: str, key: str, default: Any) -> Any:
    one = sites.get(f"layers.{layer}.{module}")
    return default if one is None else one[key]


def _by_expert(spec, sites: dict[str, Any], layers: list[int]) -> np.ndarray:
    """`[layers, experts]`: gate, up and down of an expert together."""
    zero = np.zeros(spec.shape.num_experts)
    rows = []
    for layer in layers:
        parts = [
            _norm(sites, layer, f"experts.{p}", "of_expert", zero) for p in ("gate", "up", "down")
        ]
        rows.append(np.sqrt(sum(np.square(part) for part in parts)))
    return np.array(rows)
