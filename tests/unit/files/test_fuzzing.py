"""What comes from elsewhere, mutated: each input is read, or refused by one of our errors, inside
bounds of memory, and makes nothing happen."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from mutations import Executed, bounded, fuzz, of_bytes, of_json_text, of_safetensors
from published_configs import PUBLISHED, shrunk
from safetensors.numpy import save_file

from lora_moe_rl.adapters import peft
from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import LoraMoeRlError, ReplayError
from lora_moe_rl.files import adapter_source, checkpoint, checkpoint_writing
from lora_moe_rl.files.checkpoint_contents import check_resumable
from lora_moe_rl.files.trainer_state import BEGAN, MOMENTS, file_name, key
from lora_moe_rl.files.untrusted import SafeWeights
from lora_moe_rl.ports import Written
from lora_moe_rl.rewards.own_engines import OwnEngines, Refused
from lora_moe_rl.router_replay.packed import PackedRoutes
from lora_moe_rl.router_replay.table import RouteTable
from lora_moe_rl.tiny.tokenizer import make_tokenizer

FEW, MANY = 300, 10_000
COUNTS = [
    pytest.param(FEW, id="few", marks=pytest.mark.seconds),
    pytest.param(MANY, id="many", marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
]
SIZES = shrunk(PUBLISHED["DeepSeek-V3"]) | {"first_k_dense_replace": 1, "num_hidden_layers": 2}
SETTINGS = {"rank": 4, "expert_rank": 3, "rank_pattern": {"experts.up": 2, "mlp.*": 5}}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads need address space, which is bounded here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def both(counts: dict[str, int]) -> None:
    """A fuzzer that damages everything, or nothing, finds little."""
    total = sum(counts.values())
    assert counts["refused"] > total // 4 and counts["read"], counts


@pytest.fixture
def base(tmp_path) -> Path:
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text(json.dumps(SIZES))
    return tmp_path / "base"


def adapter(config: RunConfig) -> tuple[AdapterSpec, dict[str, np.ndarray]]:
    spec = AdapterSpec.build(ModelShape.from_hf_config(SIZES), config.adapter)
    rng = np.random.default_rng(1)
    shapes = spec.tensor_shapes.items()
    return spec, {name: rng.standard_normal(size, dtype=np.float32) for name, size in shapes}


@functools.cache
def files_of(folder: Path) -> dict[Path, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder): path.read_bytes() for path in paths}


def copied(original: Path, into: Path) -> Path:
    """Over the files of the copy before: most of the time would be of folders made anew."""
    if not into.is_dir():
        shutil.copytree(original, into)
    for name, data in files_of(original).items():
        (into / name).write_bytes(data)
    return into


# ----- the four kinds of input ----------------------------------------------------------------


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("form", ["2d", "3d"])
def test_peft_directories(form, count, tmp_path, base):
    config = RunConfig(model=str(base), adapter=SETTINGS)
    peft.write(tmp_path / "original", *adapter(config), config, form)
    adapter_source.load(tmp_path / "original")  # imports what it needs

    def prepare(rng: random.Random) -> Path:
        made = copied(tmp_path / "original", tmp_path / "mutated")
        if rng.random() < 0.5:
            path = made / "adapter_config.json"
            path.write_bytes(of_json_text(rng, path.read_bytes()))
        else:
            of_safetensors(rng, made / "adapter_model.safetensors")
        return made

    count //= 2  # of each form
    both(fuzz(count, 1, prepare, adapter_source.load, (LoraMoeRlError,), tmp_path))


def write_checkpoint(root: Path, base: Path) -> Path:
    """Of two ranks, one of which has half of the experts' rows."""
    config = RunConfig(adapter=SETTINGS)
    spec, tensors = adapter(config)
    halves: list[dict[str, np.ndarray]] = [{}, {}]
    for name, whole in tensors.items():
        for kind in ("adapter", *MOMENTS):
            cut = len(whole) // 2
            zeros = (0,) * (whole.ndim - 1)
            halves[0][key(kind, name, (0, *zeros))] = whole[:cut].copy()
            halves[1][key(kind, name, (cut, *zeros))] = whole[cut:].copy()
    halves[0][key(BEGAN, spec.sites[0].name, (0,))] = np.array([3])
    metadata = {
        "step": 5,
        "data": {"next": 3},
        "done": [7],
        "adapter": config.adapter.model_dump(mode="json"),
        "base": {"path": str(base), "config": SIZES, "fingerprint": "f" * 64},
        "trainer": {"version": 5, "optimizer_steps": 5},
    }
    with checkpoint_writing.write_checkpoint(root, 5, metadata) as directory:
        for rank, half in enumerate(halves):
            save_file(half, directory / file_name(rank))
    return root / "step-000005"


def sign(directory: Path) -> None:
    """The manifest as who wrote these files, and meant harm, would have written it."""
    path = directory / checkpoint.MANIFEST
    try:
        manifest = json.loads(path.read_text())
        for name, entry in manifest["files"].items():
            data = (directory / name).read_bytes()
            entry |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        manifest.pop("sha256", None)
        manifest["sha256"] = checkpoint.digest_of(manifest)
        path.write_text(json.dumps(manifest))
    except (ValueError, TypeError, AttributeError, KeyError, OSError, RecursionError):
        return  # too damaged to be signed


@pytest.mark.parametrize("count", COUNTS)
def test_checkpoints(count, tmp_path, base):
    write_checkpoint(tmp_path / "checkpoints", base)
    adapter_source.load(tmp_path)
    check_resumable(checkpoint.newest_valid(tmp_path / "checkpoints"))
    original = (tmp_path / "checkpoints").rename(tmp_path / "original")

    def prepare(rng: random.Random) -> Path:
        made = copied(original, tmp_path / "mutated/checkpoints") / "step-000005"
        if rng.random() < 0.5:
            path = made / checkpoint.MANIFEST
            path.write_bytes(of_json_text(rng, path.read_bytes()))
        else:
            of_safetensors(rng, made / file_name(rng.randrange(2)))
        if rng.random() < 0.9 and all(p.stat().st_size < 1 << 24 for p in made.iterdir()):
            sign(made)
        return made.parent.parent

    def read(path: Path) -> None:
        adapter_source.load(path)
        check_resumable(checkpoint.newest_valid(path / "checkpoints"))

    both(fuzz(count, 2, prepare, read, (LoraMoeRlError,), tmp_path))


@pytest.mark.parametrize("where", ["rank", "rank_pattern", "targets"])
def test_a_checkpoint_whose_settings_are_nested_without_end(where, tmp_path, base):
    made = write_checkpoint(tmp_path / "checkpoints", base) / checkpoint.MANIFEST
    manifest = json.loads(made.read_text())
    deep: Any = 1
    for _ in range(700):
        deep = [deep]
    manifest["metadata"]["adapter"][where] = deep
    made.write_text(json.dumps(manifest))
    sign(made.parent)
    with pytest.raises(LoraMoeRlError, match="does not say what adapter"):
        adapter_source.load(tmp_path)


@pytest.mark.parametrize("count", COUNTS)
def test_directories_of_weights(count, tmp_path):
    original = tmp_path / "original"
    original.mkdir()
    rng = np.random.default_rng(0)
    files = {
        f"{i}.safetensors": {f"w{i}.{j}": rng.random((3, 4)) for j in range(2)} for i in (1, 2)
    }
    for name, tensors in files.items():
        save_file(tensors, original / name)
    index = {"weight_map": {t: name for name, tensors in files.items() for t in tensors}}
    (original / "model.safetensors.index.json").write_text(json.dumps(index))

    def prepare(rng: random.Random) -> Path:
        made = copied(original, tmp_path / "mutated")
        if rng.random() < 0.5:
            path = made / "model.safetensors.index.json"
            path.write_bytes(of_json_text(rng, path.read_bytes()))
        else:
            of_safetensors(rng, made / rng.choice(list(files)))
        return made

    def read(path: Path) -> None:
        with SafeWeights.open(path) as weights:
            for entry in weights.entries():
                weights.read(entry.name)

    read(original)
    both(fuzz(count, 3, prepare, read, (LoraMoeRlError,), tmp_path))


def packed_routes() -> bytes:
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((11, 3, 9)), axis=-1)[..., :4].astype(np.uint8)
    valid = rng.random((11, 3)) > 0.2
    table = RouteTable(ids, valid, np.array([0, 4, 4, 11]), (1, 2, 5), 9)
    return PackedRoutes.pack(table).to_bytes().tobytes()


def sign_routes(data: bytes) -> bytes:
    """With the checksums that belong to what it says, as far as it has a place for them."""
    if len(data) < 24:
        return data
    layers, samples = (struct.unpack_from("<I", data, at)[0] for at in (8, 20))
    sums = 24 + 4 * layers + 8 * (samples + 1)
    end = sums + 2 * 8 * samples
    if end + 8 > len(data):
        return data
    head = data[:end]
    return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head)) + data[end + 8 :]


@pytest.mark.parametrize("count", COUNTS)
def test_packed_routes(count, tmp_path):
    original = packed_routes()

    def prepare(rng: random.Random) -> bytes:
        # Mostly in the header: what stands behind it is all ids.
        head = 24 + 12 + 32 if rng.random() < 0.8 else len(original)
        made = of_bytes(rng, original[:head]) + original[head:]
        return sign_routes(made) if rng.random() < 0.9 else made

    def read(data: bytes) -> None:
        routes = PackedRoutes.from_bytes(np.frombuffer(data, np.uint8))
        for sample in range(routes.num_samples):
            routes.check(sample, "fuzzing")
        routes.cut(routes.layers[1:]).unpack()
        routes.unpack()

    read(original)
    both(fuzz(count, 4, prepare, read, (ReplayError,), tmp_path))


@pytest.mark.parametrize("count", COUNTS)
def test_requests_to_the_runs_own_engines(count, tmp_path):
    request = {
        "model": "base",
        "messages": [{"role": "system", "content": "be short"}, {"role": "user", "content": "?"}],
        "temperature": 0.5,
        "max_tokens": 7,
        "seed": 3,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    text = json.dumps(request).encode()
    server = OwnEngines()

    def check(asked: tuple) -> None:
        ids, most, temperature, seed = asked
        assert ids and 1 <= most <= 512 - len(ids)
        assert 0 <= temperature <= 2 and 0 <= seed < 2**63

    async def write(*asked) -> Written:
        return Written("so", "stop", 1)

    async def connect() -> None:
        server.connect(write, make_tokenizer(), 512)

    asyncio.run(connect())
    check(server.asked(text))
    try:
        both(
            fuzz(
                count,
                5,
                lambda rng: of_json_text(rng, text),
                lambda data: check(server.asked(data)),
                (Refused,),
                tmp_path,
            )
        )
    finally:
        server.close()


# ----- the fuzzer itself ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("read", "seen"),
    [
        (lambda path: np.ones(1 << 30), "MemoryError"),
        (lambda path: torch.empty(1 << 40), "RuntimeError"),
        (lambda path: eval("1 + 1"), "Executed"),
        (lambda path: (path / "made").write_text("x"), "Executed"),
        (lambda path: Path("/etc/hostname").read_text(), "Executed"),
        (lambda path: [][1], "IndexError"),
    ],
)
def test_the_fuzzer_sees_what_it_is_to_see(read, seen, tmp_path):
    with pytest.raises(AssertionError, match=f"input 0 of seed 9: .*{seen}"):
        fuzz(1, 9, lambda rng: tmp_path, read, (LoraMoeRlError,), tmp_path)


def test_bounds_hold_inside_alone(tmp_path):
    with bounded(tmp_path), pytest.raises(Executed):
        eval("1")
    assert eval("1") == 1 and len(np.ones(1 << 26)) == 1 << 26


def test_an_input_is_made_again_by_its_number():
    made = [of_bytes(random.Random("4-17"), packed_routes()) for _ in range(2)]
    assert made[0] == made[1] != packed_routes()
