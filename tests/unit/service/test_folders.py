"""Checkpoints by name: where they lie, how long, and that no name leads elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_moe_rl.errors import DiskError, ServiceError
from lora_moe_rl.service.backend import Lora
from lora_moe_rl.service.folders import Folders, Place, Run, Saved, place_of

MODEL = "0b5e-77:train:0"
LORA = Lora(8, 5, mlp=False)


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def folders(root: Path) -> tuple[Folders, Clock]:
    clock = Clock()
    made = Folders(root, clock)
    made.add(Run(MODEL, "tiny/moe", LORA, clock(), {"renderer": "plain"}))
    return made, clock


async def saved(made: Folders, name: str, kind="weights", text="x", ttl=None, fails=None) -> Saved:
    async def fill(directory: Path) -> None:
        directory.mkdir()
        (directory / "model").write_text(text)
        if fails is not None:
            raise fails

    now = made.clock()
    expires = None if ttl is None else now + ttl
    wanted = Saved(Place(MODEL, kind, name), "tiny/moe", LORA, now, expires)
    return await made.write(wanted, fill)


async def test_a_checkpoint_is_found_again_after_a_restart(tmp_path):
    made, clock = folders(tmp_path)
    first = await saved(made, "first", text="four")
    clock.now += 1
    second = await saved(made, "second.v1", "sampler_weights")
    again = Folders(tmp_path, clock)
    assert again.find(first.place) == first and first.size_bytes == 4
    assert again.all() == again.of(MODEL) == [second, first]
    (run,) = again.runs()
    assert run == Run(MODEL, "tiny/moe", LORA, 1000.0, {"renderer": "plain"})
    assert place_of(first.place.path) == first.place
    assert first.place.path == f"tinker://{MODEL}/weights/first"
    assert (tmp_path / MODEL / "weights/first/model").read_text() == "four"


@pytest.mark.parametrize(
    "path",
    [
        "tinker://../weights/a",
        "tinker://a/weights/..",
        "tinker://a/weights/../b",
        "tinker://a/weights/.b",
        "tinker://a/weights/",
        "tinker:///weights/a",
        "tinker://a/other/b",
        "tinker://a/./b",
        "tinker://a/weights/b\n",
        "tinker://a/weights/b%2f",
        "tinker://a/weights/" + "b" * 129,
        "a/weights/b",
        "/etc",
    ],
)
def test_no_path_leads_elsewhere(path):
    with pytest.raises(ServiceError):
        place_of(path)


async def test_the_old_one_is_there_until_the_new_one_is(tmp_path):
    made, clock = folders(tmp_path)
    old = await saved(made, "a", text="old")
    with pytest.raises(ServiceError, match="is there already: .*overwrite=True replaces it"):
        made.check_free(old.place, overwrite=False)
    made.check_free(old.place, overwrite=True)
    clock.now += 5
    with pytest.raises(DiskError):
        await saved(made, "a", text="new", fails=DiskError("full"))
    assert made.find(old.place) == old
    assert (made.directory(old.place) / "model").read_text() == "old"
    new = await saved(made, "a", text="newer")
    assert made.of(MODEL) == [new] and new.created == 1005
    assert (made.directory(old.place) / "model").read_text() == "newer"
    assert sorted(path.name for path in (tmp_path / MODEL).rglob("*")) == [
        ".a.json", "a", "model", "run.json", "weights"
    ]  # fmt: skip


async def test_what_has_expired_is_deleted(tmp_path):
    made, clock = folders(tmp_path)
    place = (await saved(made, "a", ttl=10)).place
    kept = await saved(made, "b", ttl=10)
    clock.now += 9
    assert made.find(place).expires == 1010
    made.keep_for(kept.place, 100)
    clock.now += 1
    with pytest.raises(ServiceError, match="there is no checkpoint .*, or it has expired"):
        made.find(place)
    assert not made.directory(place).exists()
    assert [one.place for one in made.all()] == [kept.place]
    made.keep_for(kept.place, None)
    clock.now += 1e9
    assert made.find(kept.place).expires is None
    made.check_free(place, overwrite=False)
    made.delete(kept.place)
    assert made.all() == [] and not made.directory(kept.place).exists()


def test_a_run_that_was_never_here(tmp_path):
    made, clock = folders(tmp_path)
    with pytest.raises(ServiceError, match="there is no training run other here"):
        made.run("other")
    with pytest.raises(ServiceError, match="is no name here"):
        made.run("..")
    clock.now += 7
    made.touch(MODEL)
    assert made.last_asked(MODEL) == 1007
