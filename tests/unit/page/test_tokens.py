"""Tokens of a sample, and what they read as."""

from recorded_run import groups_of, record, values_of
from tokenizers import Tokenizer, decoders, models

from lora_moe_rl.algorithms.base import Signal
from lora_moe_rl.data.samples import Sample, Segment
from lora_moe_rl.files.jsonl import read_jsonl
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.page.runs import Runs
from lora_moe_rl.page.tokens import TokenLines, pieces


def test_every_token_of_a_written_sample_is_kept_where_it_was_asked_for(tmp_path):
    run_dir = record(tmp_path / "run", range(1, 3), False, "logging.tokens=true")
    found = TokenLines(run_dir.tokens_file).of(2, 3)
    assert found == {
        "step": 2,
        "sample": 3,
        "ids": [7, 8, 9, 3, 4, 2],
        "versions": [1, 1, 1, -1, -1, 2],
        "logprobs": [-0.1, -1.5, -0.02, 0.0, 0.0, 0.0],
        "advantages": [0.375] * 6,
        "weights": [1.0, 1.0, 1.0, 0.0, 0.0, 1.0],
        "trainer_logprobs": [-0.1, -1.5, -0.0199998, 0.0, 0.0, 0.0],
        "entropy": [1.0, 0.5, 0.333333, 0.25, 0.2, 0.166667],
        "differences": [-2.38419e-07, 0.0, 2.38419e-07, 0.0, 0.0, 0.0],
    }
    assert [(one["step"], one["sample"]) for one in read_jsonl(run_dir.tokens_file)] == [
        (one["step"], one["sample"]) for one in read_jsonl(run_dir.samples_file)
    ]


def test_what_is_no_line_of_tokens_is_passed_over_and_others_are_read_only_when_asked_for(tmp_path):
    """Of the second line no more than its head is looked at until its sample is wanted."""
    path = tmp_path / "tokens.jsonl"
    path.write_bytes(
        b'no line\n{"step": 1, "sample": 12, "ids": [1, \n{"step": 1, "sample": 1, "ids": [3]}\n'
    )
    lines = TokenLines(path)
    assert lines.of(1, 1) == {"step": 1, "sample": 1, "ids": [3]}
    assert lines.of(1, 12) is None and lines.of(1, 2) is None


def test_where_no_policy_sampled_there_is_no_difference(tmp_path):
    """A tool's tokens have no logprob of the engine to compare; rows' own answers have none at
    all."""
    run_dir = record(tmp_path / "run", range(1, 2), False, "logging.tokens=true")
    (group, other), values = groups_of(2), values_of(groups_of(2))
    for one in values.values():
        one.logprobs[3:5] = -4.0  # the tool's, where there is one
    answer = Sample((Segment.given("user", [5]), Segment.given("policy", [7, 8, 9])), "stop", "")
    group.samples[0] = answer
    signals = [Signal.of_samples(one, one.rewards) for one in (group, other)]
    with RunDir(run_dir.config, resume=True) as again:
        again.write_samples(2, [group, other], signals, values=values)
    lines = TokenLines(run_dir.tokens_file)
    with_tool, answered = lines.of(2, 3), lines.of(2, 0)
    assert with_tool is not None and answered is not None
    assert with_tool["trainer_logprobs"][3:5] == [-4.0, -4.0]
    assert with_tool["differences"][3:5] == [0.0, 0.0]
    assert "differences" not in answered and "entropy" in answered


def test_a_run_that_was_not_asked_keeps_none_and_its_samples_are_shown_without(tmp_path):
    run_dir = record(tmp_path / "run", range(1, 2))
    assert not run_dir.tokens_file.exists()
    run = Runs(tmp_path).get("run")
    assert run is not None and (sample := run.sample(0)) is not None
    assert sample["token_data"] is None
    assert run.sample(99) is None


def test_tokens_go_back_with_their_samples(tmp_path):
    run_dir = record(tmp_path / "run", range(1, 4), False, "logging.tokens=true")
    lines = TokenLines(run_dir.tokens_file)
    assert lines.of(3, 0) is not None
    with RunDir(run_dir.config, resume=True) as again:
        again.rewind(2)
    assert lines.of(3, 0) is None and lines.of(2, 0) is not None


def test_a_character_of_several_tokens_stands_at_the_last_of_them():
    """Bytes as tokens: `ä` is two of them, a smile four."""
    text = "aä🙂b"
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    found = pieces(tokenizer, list(text.encode()))
    assert found == ["a", "", "ä", "", "", "", "🙂", "b"]
    assert pieces(None, [3, 4]) == ["⟨3⟩", "⟨4⟩"]
