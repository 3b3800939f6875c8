"""The planner's command line: what it prints, needs and refuses, and which models it knows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lora_moe_rl import cli
from lora_moe_rl.errors import ModelError
from lora_moe_rl.planner.facts import find


def run(*arguments) -> subprocess.CompletedProcess:
    code = (
        "import sys; from lora_moe_rl import cli; rc = cli.main(sys.argv[1:]);"
        "assert not {'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules); sys.exit(rc)"
    )
    command = [sys.executable, "-c", code, "plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_command_needs_no_torch():
    child = run("--model", "kimi-k2", "--gpus", "64", "--gpu", "b200", "--json")
    assert child.returncode == 0, child.stderr
    plan = json.loads(child.stdout)
    assert plan["model"]["parameters"] == 1_026_408_232_448
    assert sum(c["ranks"] for c in plan["trainer"]) == plan["gpus"]["trainer"]
    assert plan["problems"] == []


def test_the_tables_and_the_chart(tmp_path, capsys):
    picture = tmp_path / "plan.png"
    words = ["plan", "--model", "qwen3-30b-a3b", "--gpus", "8", "--search", "--png", str(picture)]
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    for text in (
        "30,532,122,624 parameters",
        "GiB",
        "routes: 336 bytes",
        "fastest layouts",
        "fits",
    ):
        assert text in shown
    assert picture.read_bytes().startswith(b"\x89PNG")


QWEN = ["--model", "qwen3-30b-a3b", "--gpus"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("gpu-memory", value) for value in ("nan", "inf", "0", "-1")),
        *(("bandwidth", "nan"), ("host-memory", "nan"), ("host-memory", "0")),
        *(("gpus", "0"), ("gpus-per-node", "0"), ("rank", "0"), ("top", "0")),
        *(("prompt-tokens", "0"), ("response-tokens", "-5")),
    ],
)
def test_numbers_that_nothing_can_have(option, value, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["plan", *QWEN, "8", f"--{option}", value])
    assert f"argument --{option}: {value} is " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "kimi-k9", "--gpus", "8"], "did you mean Kimi-K2"),
        (["--model", "kimi-k2"], "needs --gpus"),
        ([], "one recipe or --model"),
        (["--model", "kimi-k2", "recipes/tiny_arithmetic.py"], "one recipe or --model"),
        ([*QWEN, "65537"], "--gpus 65537: layouts of up to 65536 are looked for"),
        (
            [*QWEN, "8", "trainer.world_size=99999999"],
            "trainer.world_size=99999999 must be at most 65536",
        ),
        ([*QWEN, "2", "trainer.cp=4"], "trainer.cp=4 needs 4 GPUs at least, and there are 2"),
        ([*QWEN, "8", "trainer.tp=abc"], "trainer.tp='abc' is not an integer\n$"),
        ([*QWEN, "8", "trainer.world_size=abc"], "trainer.world_size='abc' is not an integer\n$"),
        ([*QWEN, "8", "--prompt-tokens", "9999"], "--prompt-tokens 9999 is .* 2048 at most"),
        ([*QWEN, "8", "--write", "/proc/none/x.py"], "^error: /proc/none: No such file"),
        (
            ["--model", "qwen3-30b-a3b", "--gpus", "16", "trainer.world_size=8", "trainer.tp=3"],
            "multiple of tp .* nearest layouts of 8 trainer ranks that do and fit: tp=",
        ),
        (
            ["--model", "qwen3-30b-a3b", "trainer.world_size=256", "trainer.ep=256"],
            "does not divide the model's 128 experts.*nearest layouts of 256 .*ep=128",
        ),
        (["--model", "qwen3-30b-a3b", "--gpus", "8", "trainer.tpp=2"], "tpp"),
        (
            ["--model", "qwen3-30b-a3b", "--gpus", "8", "model.max_length=65536"],
            "model.max_length=65536 is more than the model's 40960 positions\n$",
        ),
        (["--model", "kimi-k2", "model.path=x", "--gpus", "8"], "are two models: name one"),
    ],
)
def test_bad_input(words, said, capsys):
    import re

    assert cli.main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert re.search(said, error, re.DOTALL), error


def test_a_config_that_lacks_a_field(tmp_path):
    config = dict(find("kimi-k2").config)
    del config["moe_intermediate_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="lacks the key 'moe_intermediate_size'"):
        find(str(tmp_path))
    with pytest.raises(ModelError, match="no config.json"):
        find(str(tmp_path.parent))


def test_quantised_directories_are_known_by_their_config(tmp_path):
    config = dict(find("kimi-k2").config)
    int4 = {"quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}  # fmt: skip
    mxfp4 = int4 | {"format": "mxfp4-pack-quantized"}
    for quantization, form in (
        ({"quant_method": "fp8"}, "fp8"), (int4, "int4"), (mxfp4, "mxfp4"), (None, "bf16")
    ):  # fmt: skip
        entry = {"quantization_config": quantization} if quantization else {}
        (tmp_path / "config.json").write_text(json.dumps(config | entry))
        assert find(str(tmp_path)).checkpoint == form
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "awq"}})
    )
    with pytest.raises(ModelError, match="awq"):
        find(str(tmp_path))


def test_a_setting_names_the_model_that_is_planned(capsys):
    """Another than the recipe's, whose 2507 form has more positions."""
    recipe = str(Path(__file__).parents[3] / "recipes/long_context_30b.py")
    thinking = "Qwen/Qwen3-30B-A3B-Thinking-2507"
    for model, parameters in (("moonlight-16b-a3b", 15_960_110_208), (thinking, 30_532_122_624)):
        length = "131072" if model == thinking else "8192"
        words = [f"model={model}", f"model.max_length={length}", "rollout.max_response_tokens=4096"]
        cli.main(["plan", recipe, *words, "trainer.tp=2", "trainer.cp=2", "--json"])
        plan = json.loads(capsys.readouterr().out)
        assert plan["model"]["parameters"] == parameters
