"""Checkpoints by name: where they lie, how long, and that no name leads elsewhere."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from lora_moe_rl.errors import DiskError, ServiceError
from lora_moe_rl.service.backend import Lora
from lora_moe_rl.service.folders import Folders, Run, Saved
from lora_moe_rl.service.place import Place, place_of

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


async def test_what_is_read_stays_as_it_is(tmp_path):
    """Ranks open its files one after the other: they are all of one checkpoint."""
    made, clock = folders(tmp_path)
    place = (await saved(made, "a", text="old", ttl=10)).place
    with made.reading(place) as directory, made.reading(place):
        with pytest.raises(ServiceError, match="is being loaded: delete it when that is done"):
            made.delete(place)
        written = asyncio.create_task(saved(made, "a", text="newer", ttl=10))
        await asyncio.sleep(0.05)
        assert (directory / "model").read_text() == "old" and not written.done()
    assert made.find((await written).place).size_bytes == 5
    with made.reading(place) as directory:
        clock.now += 11
        made.sweep()
        assert (directory / "model").read_text() == "newer"
        with pytest.raises(ServiceError, match="or it has expired"), made.reading(place):
            pass
    made.sweep()
    assert not made.directory(place).exists() and not made.all()
    with pytest.raises(ServiceError, match="there is no checkpoint"), made.reading(place):
        pass


async def test_what_is_written_anew_as_it_expires_is_not_deleted(tmp_path, monkeypatch):
    made, clock = folders(tmp_path)
    place = (await saved(made, "a", text="old", ttl=10)).place
    clock.now += 10
    told, first = made._told, []

    def old(place: Place) -> Saved | None:
        """Whoever sweeps has read the old one, and then it is replaced."""
        found = told(place)
        if not first:
            first.append(found)
            asyncio.run(saved(made, "a", text="new"))
        return found

    monkeypatch.setattr(made, "_told", old)
    await asyncio.to_thread(made.sweep)
    assert made.find(place).expires is None
    assert (made.directory(place) / "model").read_text() == "new"


async def test_what_a_server_that_was_killed_has_left_is_tidied_up(tmp_path):
    made, _ = folders(tmp_path)
    kept = await saved(made, "a", text="old")
    incoming, final = tmp_path / MODEL / ".incoming", made.directory(kept.place)
    for half in (incoming / "fresh/b", tmp_path / MODEL / ".gone-1"):
        half.mkdir(parents=True)
        (half / "model").write_text("half")
    (incoming / "weights").mkdir()
    final.rename(incoming / "weights/a")  # killed between two renames
    again = Folders(tmp_path)
    assert again.find(kept.place) == kept and (final / "model").read_text() == "old"
    assert sorted(path.name for path in (tmp_path / MODEL).iterdir()) == ["run.json", "weights"]


def test_a_run_that_was_never_here(tmp_path):
    made, clock = folders(tmp_path)
    with pytest.raises(ServiceError, match="there is no training run other here"):
        made.run("other")
    with pytest.raises(ServiceError, match="is no name here"):
        made.run("..")
    clock.now += 7
    made.touch(MODEL)
    assert made.last_asked(MODEL) == 1007
