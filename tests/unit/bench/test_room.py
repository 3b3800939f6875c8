"""Benchmarks that write a checkpoint look at the disk first."""

from __future__ import annotations

import pytest

from lora_moe_rl.bench import export, loading
from lora_moe_rl.errors import BenchmarkError


@pytest.mark.parametrize(("bench", "name"), [(export, "export"), (loading, "loading")])
def test_a_checkpoint_larger_than_the_disk_is_not_begun(monkeypatch, tmp_path, bench, name):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(bench, "measure", None)
    words = rf"bench {name} --gb 1e\+09 takes \d+ GB of .* GB free: name another with"
    with pytest.raises(BenchmarkError, match=words):
        bench.main(["--gb", "1e9", "--json"])
    assert not list(tmp_path.iterdir())
