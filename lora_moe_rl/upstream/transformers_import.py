"""Mend for transformers 5.12.1: it is imported without looking through all that is installed.

`transformers/utils/import_utils.py` makes a table of all installed packages, of which it asks two
or three names, and reads some two thousand files of models for what each of them exports,
twice: once for `transformers` and once for `transformers.models`. Here a package is looked up when
it is asked for, and the files are read once. Together that is half of what the import takes, in
each process of a run. Importing this file imports no transformers.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata as metadata
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import ModuleType
from typing import Any

from lora_moe_rl.upstream.checks import require_attributes, require_parameters
from lora_moe_rl.upstream.versions import installed, is_tested

WHO = "lora_moe_rl/upstream/transformers_import.py"
PACKAGE, FINDS_OUT = "transformers", "transformers.utils.import_utils"
READS, TABLE = "create_import_structure_from_path", "PACKAGE_DISTRIBUTION_MAPPING"


def import_transformers() -> None:
    """Does nothing when it is imported already, and imports another version than the tested one as
    ever. Raises ConfigError when this one is not as we know it."""
    if PACKAGE in sys.modules:
        return
    if not is_tested(PACKAGE, installed(PACKAGE) or ""):
        importlib.import_module(PACKAGE)
        return
    whole, finder = metadata.packages_distributions, _ReadsOnce()
    metadata.packages_distributions = lambda: Distributions(whole)
    sys.meta_path.insert(0, finder)
    try:
        importlib.import_module(f"{PACKAGE}.models")
    finally:
        sys.meta_path.remove(finder)
        metadata.packages_distributions = whole
    require_attributes(sys.modules[FINDS_OUT], (READS, TABLE), WHO)


class Distributions(Mapping[str, list[str]]):
    """What `importlib.metadata.packages_distributions` gives: by an importable name, the
    distributions that have it. Made in full for a name that is not its own distribution's."""

    def __init__(self, whole: Callable[[], Mapping[str, list[str]]]):
        self._whole = cache(whole)

    def __getitem__(self, name: str) -> list[str]:
        try:
            own = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            return self._whole()[name]
        if name in (own.read_text("top_level.txt") or "").split():
            return [own.metadata["Name"]]
        return self._whole()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole())

    def __len__(self) -> int:
        return len(self._whole())


class _ReadsOnce:
    """Finds `import_utils`, and has it remember what it has read of a folder."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name != FINDS_OUT:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            require_parameters(getattr(module, READS), ("module_path",), WHO)
            setattr(module, READS, _read_once(getattr(module, READS)))

        spec.loader.exec_module = exec_module
        return spec


def _read_once(read: Callable[[str], Any]) -> Callable[[str | os.PathLike[str]], Any]:
    """Of a file its folder is read, as upstream does."""
    of_folder = cache(read)

    def structure(module_path: str | os.PathLike[str]) -> Any:
        path = os.fspath(module_path)
        return of_folder(os.path.dirname(path) if os.path.isfile(path) else path)

    return structure
