"""What benchmarks refuse before they begin."""

import pytest

from lora_moe_rl.bench import cost, dequant, head_child, overhead
from lora_moe_rl.errors import ConfigError


@pytest.mark.parametrize(
    ("main", "words", "said"),
    [
        (overhead.main, ["--steps", "2"], "2 is less than 3"),
        (dequant.main, ["--layers", "1"], "1 is less than 2"),
        (dequant.main, ["--hidden", "100"], "100 is no multiple of 32"),
        (dequant.main, ["--width", "0"], "0 is less than 32"),
        (dequant.main, ["--experts", "x"], "invalid number value: 'x'"),
    ],
)
def test_sizes_that_cannot_be(main, words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_an_algorithm_that_samples_nothing_has_no_step_to_compare(name):
    with pytest.raises(ConfigError, match=f"--algorithms {name}: it samples nothing"):
        cost.main(["--algorithms", f"grpo,{name}"])


def test_the_head_of_few_tokens_and_words_is_measured():
    figures, logprobs, gradient = head_child.run(head_child.ours, 3, 8, 50)
    assert figures["seconds"] > 0 and logprobs.shape == (3,) and gradient.shape == (3, 8)
