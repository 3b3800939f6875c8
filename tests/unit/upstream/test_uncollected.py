"""The collector rests while something large is imported, and leaves that alone."""

import gc

import pytest

from lora_moe_rl.upstream.uncollected import uncollected


@pytest.fixture(autouse=True)
def as_before():
    was = gc.isenabled()
    gc.enable()
    yield
    gc.unfreeze()
    (gc.enable if was else gc.disable)()


def collections() -> int:
    return sum(one["collections"] for one in gc.get_stats())


def many() -> list[list]:
    return [[] for _ in range(100_000)]


def test_many_objects_make_no_collection_within_it_and_some_after():
    with uncollected():
        before = collections()
        made = many()
        assert collections() == before
    after = collections()
    assert many() and made
    assert collections() > after + 10


def test_what_is_there_by_then_is_not_looked_at_again():
    with uncollected():
        made = many()
    assert gc.get_freeze_count() >= len(made)


def test_it_ends_with_an_error_too():
    with pytest.raises(ImportError), uncollected():
        raise ImportError("no such thing")
    assert gc.isenabled()


def test_one_within_another_ends_with_the_outer_one():
    with uncollected():
        with uncollected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
