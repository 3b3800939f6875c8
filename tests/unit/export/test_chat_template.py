"""A run's own chat template in what is exported of it, read by transformers' AutoTokenizer and
AutoProcessor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_families
from template_run import save_run
from transformers import AutoTokenizer

from lora_moe_rl.cli import main
from lora_moe_rl.export import chat_template
from lora_moe_rl.tiny.tokenizer import make_tokenizer

OWN = "{% for m in messages %}<<{{ m.content }}>>\n{% endfor %}é"
BASES = "{% for m in messages %}PLANTED{% endfor %}"
LATER = "{% for m in messages %}of a later life{% endfor %}"
MESSAGES = [{"role": "user", "content": "2+3="}]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """With a template in every place that transformers knows."""
    folder = tmp_path_factory.mktemp("template") / "base"
    tiny_families.save("qwen3_moe", folder)
    make_tokenizer().save_pretrained(folder)
    (folder / chat_template.FILE).write_text(BASES)
    (folder / chat_template.MORE).mkdir()
    (folder / chat_template.MORE / "tool_use.jinja").write_text(BASES)
    for name in ("tokenizer_config.json", "processor_config.json", "chat_template.json"):
        path = folder / name
        settings = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(settings | {"chat_template": BASES}))
    return folder


def export(source: Path, out: Path, *options: str) -> int:
    return main(["export", str(source), "--out", str(out), *options])


def rendered(model: Path, **more) -> str:
    tokenizer = AutoTokenizer.from_pretrained(model)
    return tokenizer.apply_chat_template(MESSAGES, tokenize=False, **more)


def test_a_merged_model_renders_as_the_run_did(base, tmp_path, capsys):
    run, out = save_run(tmp_path / "run", base, OWN), tmp_path / "out"
    assert "PLANTED" in rendered(base)
    assert export(run, out, "--to", "merged") == 0
    assert f"{out}/chat_template.jinja: the run's own chat template" in capsys.readouterr().out
    assert rendered(out) == rendered(out, tools=[]) == "<<2+3=>>\né"
    (out / chat_template.FILE).unlink()  # as a reader that does not know this file
    assert rendered(out) == "<<2+3=>>\né"
    assert "chat_template.jinja" in (out / "README.md").read_text()
    left = [path for path in out.rglob("*") if path.is_file() and b"PLANTED" in path.read_bytes()]
    assert not left


def test_tools_and_processors_have_no_other_template_either(base, tmp_path):
    from transformers import ProcessorMixin

    run, out = save_run(tmp_path / "run", base, OWN), tmp_path / "out"
    assert export(run, out, "--to", "merged") == 0
    tool = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
    assert rendered(out, tools=[tool]) == "<<2+3=>>\né"
    assert ProcessorMixin.get_processor_dict(out)[0]["chat_template"] == OWN


def test_a_peft_directory_has_it_and_the_printed_command_names_it(base, tmp_path, capsys):
    checkpoint = save_run(tmp_path / "run", base, OWN) / "checkpoints" / "step-000003"
    for number, options in enumerate(((), ("--for", "vllm"), ("--form", "3d"))):
        out = tmp_path / f"out{number}"
        assert export(checkpoint, out, "--to", "peft", *options) == 0
        printed = capsys.readouterr().out
        assert (out / chat_template.FILE).read_text() == OWN
        assert f"{out}/chat_template.jinja: the run's own chat template" in printed
        assert (f" --chat-template {out}/chat_template.jinja " in printed) == ("3d" not in options)
        assert "`chat_template.jinja`" in (out / "README.md").read_text()


@pytest.mark.parametrize("to", ["peft", "merged"])
def test_without_one_the_bases_stays(base, tmp_path, capsys, to):
    run, out = save_run(tmp_path / "run", base, None), tmp_path / "out"
    assert export(run, out, "--to", to) == 0
    printed = capsys.readouterr().out
    assert "chat template" not in printed and "--chat-template" not in printed
    assert "chat template" not in (out / "README.md").read_text()
    if to == "merged":
        for name in (chat_template.FILE, f"{chat_template.MORE}/tool_use.jinja"):
            assert (out / name).read_bytes() == (base / name).read_bytes()
    else:
        assert not (out / chat_template.FILE).exists()


def test_it_is_the_one_that_made_the_checkpoint(base, tmp_path):
    run, out = save_run(tmp_path / "run", base, LATER, noted=OWN), tmp_path / "out"
    assert export(run, out, "--to", "peft") == 0
    assert (out / chat_template.FILE).read_text() == OWN


def test_that_it_is_not_known_is_warned_of(base, tmp_path, capsys):
    run, out = save_run(tmp_path / "run", base, OWN), tmp_path / "out"
    (run / "config.yaml").write_text("model: [")
    assert export(run, out, "--to", "peft") == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "the tokenizer's own chat template is taken; whether the run had another" in said


def test_it_goes_on_with_a_peft_directory(base, tmp_path):
    run, peft, other = save_run(tmp_path / "run", base, OWN), tmp_path / "peft", tmp_path / "other"
    assert export(run, peft, "--to", "peft") == 0
    assert main(["adapter", "resize", str(peft), "--rank", "1", "--out", str(other)]) == 0
    assert (other / chat_template.FILE).read_text() == OWN
    assert export(other, tmp_path / "merged", "--to", "merged") == 0
    assert rendered(tmp_path / "merged") == "<<2+3=>>\né"
