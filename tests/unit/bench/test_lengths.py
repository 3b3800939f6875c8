"""The micro-batches of `bench lengths`: as many tokens, in samples of unlike lengths."""

from lora_moe_rl.bench.lengths import lengths_of


def test_each_kind_has_about_as_many_tokens():
    found = lengths_of(samples=16, tokens=256)
    assert {kind: len(one) for kind, one in found.items()} == dict.fromkeys(found, 16)
    assert found["equal"].tolist() == [256] * 16
    assert found["one is long"].sum() == 4096 and found["one is long"].max() == 4096 - 15 * 128
    assert 4096 - 16 <= found["lognormal"].sum() <= 4096 + 16
    assert found["lognormal"].max() > 4 * found["lognormal"].min() >= 8


def test_the_smallest_has_tokens_in_every_sample():
    assert all(one.min() >= 1 for one in lengths_of(samples=2, tokens=2).values())
