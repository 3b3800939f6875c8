"""Weights of a checkpoint that are not the language model's, in vLLM's own loader of weights."""

import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from lora_moe_rl.rollout import left_out

pytestmark = pytest.mark.seconds  # imports vLLM
WEIGHTS = [
    ("model.weight", torch.ones(1, 2)),
    ("model.visual.blocks.0.weight", torch.ones(1)),
    ("lm_head.weight", torch.ones(1, 2)),
]


def model() -> torch.nn.Module:
    linears = {name: torch.nn.Linear(2, 1, bias=False) for name in ("model", "lm_head")}
    return torch.nn.ModuleDict(linears)


def test_other_weights_are_passed_over(monkeypatch):
    loader = left_out.AutoWeightsLoader
    monkeypatch.setattr(loader, "load_weights", left_out.stock)
    with pytest.raises(ValueError, match="visual"):
        loader(model()).load_weights(WEIGHTS)
    left_out.install(("model.visual.",))
    whole = model()
    assert loader(whole).load_weights(WEIGHTS) == {"model.weight", "lm_head.weight"}
    assert all(bool((one == 1).all()) for one in whole.parameters())
    with pytest.raises(ValueError, match="other"):
        loader(model()).load_weights([("model.other.weight", torch.ones(1))])


IMPORTS = """
import importlib.util, sys
from lora_moe_rl.rollout import cpu_vision
cpu_vision.install()
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize
print(importlib.util.find_spec("torchvision") is not None, "torchvision" in sys.modules)
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed")
def test_a_file_that_wants_torchvision_is_imported_without():
    command = [sys.executable, "-c", IMPORTS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
    bare = [sys.executable, "-c", IMPORTS.replace("cpu_vision.install()", "")]
    assert (
        "No module named 'torchvision'" in subprocess.run(bare, capture_output=True).stderr.decode()
    )
