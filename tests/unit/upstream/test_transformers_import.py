"""transformers is what it is, whether or not it looks through all that is installed."""

import importlib.metadata as metadata
import json
import subprocess
import sys
import textwrap

import pytest

from lora_moe_rl.upstream import transformers_import
from lora_moe_rl.upstream.transformers_import import Distributions

PROGRAM = textwrap.dedent(
    """
    import builtins, importlib.metadata, json, os, sys
    whole, read, opened = importlib.metadata.packages_distributions, [], builtins.open

    def noted(file, *args, **options):
        read.append(str(file))
        return opened(file, *args, **options)

    builtins.open = noted
    if sys.argv[1] == "ours":
        from lora_moe_rl.upstream.transformers_import import import_transformers
        import_transformers()
        assert importlib.metadata.packages_distributions is whole, "left behind"
        assert not [one for one in sys.meta_path if type(one).__name__ == "_ReadsOnce"]
    import transformers
    import transformers.models
    from transformers.models import qwen3_moe
    from transformers.utils import import_utils

    def plain(one):
        if isinstance(one, dict):
            return {str(plain(key)): plain(value) for key, value in one.items()}
        return sorted(map(str, one)) if isinstance(one, set | frozenset | list) else str(one)

    lazy = transformers, transformers.models, qwen3_moe
    names = "_import_structure", "_class_to_module", "_object_missing_backend", "_modules"
    models = os.path.dirname(transformers.models.__file__)
    print(json.dumps({
        "structures": [plain(getattr(one, name)) for one in lazy for name in names],
        "torch": import_utils._is_package_available("torch", True),
        "none": import_utils._is_package_available("no_such_package", True),
        "reads": sum(os.path.dirname(os.path.dirname(path)) == models for path in read),
        "in full": dict(import_utils.PACKAGE_DISTRIBUTION_MAPPING) == whole(),
    }))
    """
)


def found(how: str) -> dict:
    command = [sys.executable, "-c", PROGRAM, how]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.seconds
def test_it_exports_what_it_does_otherwise_and_reads_half_as_much():
    ours, theirs = found("ours"), found("theirs")
    assert ours["structures"] == theirs["structures"]
    assert len(ours["structures"][1]) > 1000
    for name in ("torch", "none", "in full"):
        assert ours[name] == theirs[name], name
    assert ours["in full"]
    assert 500 < ours["reads"] < 0.51 * theirs["reads"]


def test_a_package_that_is_its_own_distribution_is_looked_up_alone():
    def whole():
        raise AssertionError("made in full")

    assert Distributions(whole)["torch"] == ["torch"]
    assert Distributions(whole)["markupsafe"] == ["MarkupSafe"]


def test_any_other_is_found_in_the_whole():
    whole = metadata.packages_distributions()
    found = Distributions(metadata.packages_distributions)
    assert found["yaml"] == whole["yaml"] == ["PyYAML"]
    assert found.get("no_such_package", []) == []
    assert set(found) == set(whole) and len(found) == len(whole)


@pytest.mark.parametrize("version", ["5.17.0", None])
def test_another_version_is_imported_as_ever(monkeypatch, version):
    monkeypatch.setattr(transformers_import, "installed", lambda package: version)
    monkeypatch.setattr(transformers_import, "PACKAGE", "this")  # of Python's own
    monkeypatch.setattr(transformers_import, "is_tested", lambda package, found: False)
    monkeypatch.delitem(sys.modules, "this", raising=False)
    transformers_import.import_transformers()
    assert "this" in sys.modules


@pytest.mark.seconds
def test_one_that_reads_otherwise_is_refused():
    program = (
        "from lora_moe_rl.upstream import transformers_import\n"
        "transformers_import.READS = 'spread_import_structure'\n"
        "transformers_import.import_transformers()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "to take ('module_path',)" in done.stderr
