"""Modules import each other in one direction only, as their source says: no circle, no layer that
reaches above itself. Imports inside functions and for types alone are left out."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "lora_moe_rl"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# `rglob` does not follow the links to the top folders.
FILES = [*(ROOT / PACKAGE).rglob("*.py")]
FILES += [
    path for link in (ROOT / PACKAGE).iterdir() if link.is_symlink() for path in link.rglob("*.py")
]
MODULES = {module_name(path): path for path in FILES}


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All that runs when the module is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from statements(child)


def imported(source: str) -> set[str]:
    """Modules that a source imports: of ours by their own name, of others the package."""
    found = set()
    for node in statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, "imports are written out"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            ours = names & set(MODULES)
            found |= ours | ({node.module} if ours != names else set())
    return {name if name in MODULES else name.partition(".")[0] for name in found}


IMPORTS = {name: imported(path.read_text()) for name, path in MODULES.items()}


def room(module: str) -> str:
    """The folder of the package that a module stands in, or the module itself; or another's
    package."""
    parts = module.split(".")
    return parts[1] if parts[0] == PACKAGE and len(parts) > 1 else parts[0]


def test_all_modules_are_looked_at():
    rooms = {room(module) for module in MODULES}
    assert {"adapters", "kernels", "refit", "router_replay", "verify", "bench", "run"} <= rooms
    assert len(MODULES) > 200


def test_what_is_imported_only_in_functions_or_for_types_does_not_count():
    source = """
import torch.nn
from lora_moe_rl import errors
from lora_moe_rl.errors import ConfigError
if TYPE_CHECKING:
    import ray
try:
    import psutil
except ImportError:
    pass
def lazily():
    import vllm
class Thing:
    import numpy
    def method(self):
        import peft
"""
    assert imported(source) == {"torch", "lora_moe_rl.errors", "psutil", "numpy"}


def test_what_is_imported_from_us_is_there_also_in_functions():
    packages = {name.rpartition(".")[0] for name in MODULES} | set(MODULES)
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
                assert node.module in packages, f"{name} imports {node.module}, which is gone"


def test_no_modules_import_each_other_in_a_circle():
    graph = {name: found & set(MODULES) - {PACKAGE} for name, found in IMPORTS.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


@pytest.mark.parametrize(
    ("layer", "above"),
    [
        ("adapters", {"refit", "run", "trainer", "cluster", "router_replay"}),
        ("refit", {"run", "trainer", "cluster", "router_replay"}),
        ("router_replay", {"refit", "run", "trainer", "cluster", "rollout"}),
        ("config", {"run", "trainer", "cluster", "torch", "ray", "vllm", "megatron"}),
        ("ports", {"trainer", "rollout", "cluster", "torch", "ray", "vllm", "megatron"}),
        ("algorithms", {"run", "trainer", "rollout", "cluster", "ray", "vllm", "megatron"}),
        ("export", {"run", "trainer", "cluster", "verify", "bench"}),
        ("planner", {"run", "cluster", "bench", "ray", "vllm"}),
    ],
)
def test_a_layer_does_not_import_what_is_above_it(layer, above):
    mine = {name: found for name, found in IMPORTS.items() if room(name) == layer}
    assert mine
    upward = {
        name: sorted(other for other in found if room(other) in above)
        for name, found in mine.items()
    }
    assert not {name: others for name, others in upward.items() if others}


def test_kernels_know_of_ours_nothing_but_errors():
    for name, found in IMPORTS.items():
        if room(name) == "kernels":
            ours = {other for other in found if other.startswith(PACKAGE)}
            assert {room(other) for other in ours} <= {"kernels", "errors"}, name


def test_nothing_that_a_run_needs_imports_a_benchmark_or_a_check():
    for name, found in IMPORTS.items():
        if room(name) not in ("bench", "verify", "planner", "chaos"):
            assert not {room(other) for other in found} & {"bench", "verify", "chaos"}, name


def test_no_module_has_a_name_of_the_standard_library():
    """In such a folder Python could not even start a script."""
    taken = {name for name in MODULES if name.rpartition(".")[2] in sys.stdlib_module_names}
    assert not taken
