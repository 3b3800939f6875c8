"""Build a tiny model: make the shape, pre-train it, save it as a Hugging Face directory."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from lora_moe_rl.tiny import pretrain, shapes, tokenizer
from lora_moe_rl.tiny.make import shape_of

# What was reached is written beside the weights; nothing reads it back.
RECORD = "lora_moe_rl.json"


def build(name: str, out: Path, progress: bool, start: Path | None = None) -> None:
    """Write the model to `out`, whole or not at all; what stood there is replaced. Without `start`,
    a model to go on from, it begins with random weights.

    Two processes may do this at the same time: the later one finds the earlier one's model, which
    is the same, and drops its own.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        model, record = _train(name, progress, start)
        _save(name, model, record, scratch)
        scratch.chmod(0o755)
        put(scratch, out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _train(name: str, progress: bool, start: Path | None) -> tuple[PreTrainedModel, dict]:
    recipe = pretrain.RECIPES[name]
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[reached]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),  # what is printed for programs goes to stdout
        disable=not progress,
    )
    with torch.random.fork_rng(devices=[]), bar:
        task = bar.add_task(f"pre-training {name}", total=1.0, reached="")

        def on_eval(share: float, accuracy: pretrain.Accuracy) -> None:
            reached = f"samples right {accuracy.sampled:.0%}, greedy {accuracy.greedy:.0%}"
            bar.update(task, completed=share, reached=reached)

        torch.manual_seed(recipe.seed)
        if start is None:
            model = shapes.build_model(name)
        else:
            model = AutoModelForCausalLM.from_pretrained(start)
        accuracy = pretrain.pretrain(model, recipe, on_eval)
    return model.eval(), {"name": name, "recipe": asdict(recipe), "accuracy": asdict(accuracy)}


def _save(name: str, model: PreTrainedModel, record: dict, out: Path) -> None:
    eos, pad, bos = (tokenizer.token_id(token) for token in ("<eos>", "<pad>", "<bos>"))
    model.generation_config = GenerationConfig(
        bos_token_id=bos, eos_token_id=eos, pad_token_id=pad, do_sample=True
    )
    transformers_logging.disable_progress_bar()  # ours is enough
    model.save_pretrained(out)
    tokenizer.make_tokenizer().save_pretrained(out)
    config_file = out / "config.json"
    config = json.loads(config_file.read_text()) | shapes.EXTRA_CONFIG[shape_of(name)]
    config_file.write_text(json.dumps(config, indent=2) + "\n")
    (out / RECORD).write_text(json.dumps(record, indent=2) + "\n")


def put(scratch: Path, out: Path) -> None:
    """Rename `scratch` to `out`. A directory that has files cannot be renamed over, so an older
    one is moved aside first; when another process is faster, its model stays."""
    if out.exists():
        aside = Path(tempfile.mkdtemp(prefix=f".{out.name}-old-", dir=out.parent))
        with suppress(FileNotFoundError):  # another process has just done it
            os.rename(out, aside)
        shutil.rmtree(aside, ignore_errors=True)
    try:
        os.rename(scratch, out)
    except OSError:
        if not (out / RECORD).exists():
            raise
