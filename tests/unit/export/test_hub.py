"""`export --push-to-hub`, from the command line, against a hub of our own on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from fake_hub import FakeHub, serving
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

from lora_moe_rl.cli import main

TOKEN, REPO = "hf_secretsecret", "me/mine"
NOWHERE = "http://127.0.0.1:9"  # where nobody listens


class Done(NamedTuple):
    code: int
    stdout: str
    stderr: str


Export = Callable[..., Done]


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with serving() as found:
        yield found


@pytest.fixture
def export(adapter, tmp_path, monkeypatch, capsys) -> Export:
    """The hub's library has read its settings when it was imported: they are set anew in it."""

    def export(*options: str, **environment: str) -> Done:
        monkeypatch.setattr(constants, "ENDPOINT", environment.pop("HF_ENDPOINT", NOWHERE))
        monkeypatch.setattr(
            constants, "HF_HUB_OFFLINE", environment.pop("HF_HUB_OFFLINE", "") == "1"
        )
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no login"))
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        out = str(tmp_path / "out")
        code = main(["export", str(adapter), "--to", "peft", "--out", out, *options])
        told = capsys.readouterr()
        return Done(code, told.out, told.err)

    return export


def test_all_files_are_pushed_to_a_private_repository_and_the_token_is_in_none(
    hub, export, tmp_path
):
    done = export("--push-to-hub", REPO, HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN)
    assert done.code == 0, done.stderr
    assert f"{hub.url}/{REPO}" in done.stdout and hub.repos == {REPO: True}
    written = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert hub.files[REPO] == written and "README.md" in written
    assert f"Bearer {TOKEN}" in hub.tokens
    everything = [done.stdout.encode(), done.stderr.encode(), *written.values()]
    assert not any(TOKEN.encode() in one for one in everything)


def test_what_is_there_and_public_is_pushed_to_only_when_that_is_meant(hub, export, tmp_path):
    hub.repos[REPO] = False
    done = export("--push-to-hub", REPO, HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN)
    assert done.code == 1 and not hub.files
    assert "it is there already, and is public: give --public" in done.stderr
    (tmp_path / "out").rename(tmp_path / "before")
    done = export("--push-to-hub", REPO, "--public", HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN)
    assert done.code == 0, done.stderr
    assert "adapter_config.json" in hub.files[REPO]


def test_what_is_there_and_private_is_not_taken_for_public(hub, export, tmp_path):
    hub.repos[REPO] = True
    done = export("--push-to-hub", REPO, "--public", HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN)
    assert done.code == 1 and not hub.files
    said = " ".join(done.stderr.split())
    assert "it is there already, and is private: leave out --public, or make it public" in said
    assert f"hf upload {REPO} {tmp_path / 'out'} . --private" in said


def test_a_merged_model_has_a_card_of_its_own_and_not_the_bases(hub, adapter, tmp_path, export):
    base, out = adapter.parent / "base", tmp_path / "merged"
    (base / "README.md").write_text("# The base\n\nThe latest generation.\n")
    (base / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    (base / "adapter_model.safetensors").write_bytes(b"")
    merged = ("--to", "merged", "--out", str(out), "--base", str(base))
    done = export(*merged, "--push-to-hub", REPO, HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN)
    assert done.code == 0, done.stderr
    card = hub.files[REPO]["README.md"].decode()
    assert "`base` with a LoRA adapter merged into it" in card and "generation" not in card
    assert "library_name: transformers" in card and str(base) not in card
    assert not [path.name for path in out.iterdir() if path.name.startswith("adapter_")]
    AutoModelForCausalLM.from_pretrained(out)


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        ({}, "there is no token: log in with `hf auth login`, or set HF_TOKEN"),
        ({"HF_TOKEN": TOKEN}, "onnect"),
    ],
    ids=["offline", "no token", "no network"],
)
def test_what_cannot_be_pushed_is_exported_and_kept(export, tmp_path, environment, why):
    done = export("--push-to-hub", REPO, **environment)
    out = tmp_path / "out"
    assert done.code == 1 and (out / "adapter_model.safetensors").is_file()
    said = " ".join(done.stderr.split())
    assert f"{out} is written, and was not pushed to {REPO}: " in said and why in said
    assert f"to push it later: hf upload {REPO} {out} . --private" in said
    assert TOKEN not in said and "Traceback" not in said


def test_a_hub_that_refuses_is_named_with_its_reason(hub, export):
    hub.refuses = 403
    done = export("--push-to-hub", REPO, "--public", HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN)
    assert done.code == 1 and not hub.files
    assert "403" in done.stderr and "--no-private" in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--public",), "--public has no effect without --push-to-hub"),
        (("--push-to-hub", "mine"), "--push-to-hub mine names no owner: write OWNER/NAME"),
        (("--push-to-hub", "me/mi ne"), "--push-to-hub me/mi ne: "),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_written(
    adapter, tmp_path, capsys, options, said
):
    words = ["export", str(adapter), "--to", "peft", "--out", str(tmp_path / "out"), *options]
    assert main(words) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_the_hubs_own_variables_are_heeded(hub, adapter, tmp_path):
    """In a process of its own, as a user has it."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    kept |= {"HF_HOME": str(tmp_path / "home"), "HF_TOKEN": TOKEN, "HF_ENDPOINT": hub.url}
    words = ["export", str(adapter), "--to", "peft", "--out", str(tmp_path / "out")]
    command = [sys.executable, "-m", "lora_moe_rl", *words, "--push-to-hub", REPO]
    for offline, code in (("1", 1), ("0", 0)):
        done = subprocess.run(command, env=kept | {"HF_HUB_OFFLINE": offline}, check=False)
        assert done.returncode == code and bool(hub.files) == (code == 0)
        (tmp_path / "out").rename(tmp_path / offline)
