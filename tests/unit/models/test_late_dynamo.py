"""The tokenizer does not import torch's compiler, and models still run in the same process."""

import subprocess
import sys
import textwrap

import pytest

# The mask of a sliding window with a function beside it goes the way that takes the name.
PROGRAM = textwrap.dedent(
    """
    import sys
    from lora_moe_rl.models.late_dynamo import MODULE, late_dynamo

    with late_dynamo():
        from transformers import AutoTokenizer
    assert AutoTokenizer
    assert "torch._dynamo" not in sys.modules, "imported after all"
    assert MODULE not in sys.modules, "left behind"

    import torch
    from transformers import masking_utils
    {planted}
    def allowed(batch, head, query, key):
        return table[batch, query, key] & (key <= query)

    table = torch.rand(2, 5, 5, generator=torch.Generator().manual_seed(1)) < 0.7
    how = {{"use_vmap": True, "allow_is_causal_skip": False}}
    found = masking_utils.sdpa_mask(2, 5, 5, mask_function=allowed, **how)
    wanted = torch.tensor(
        [[[bool(table[b, q, k]) and k <= q for k in range(5)] for q in range(5)] for b in range(2)]
    )
    assert torch.equal(found[:, 0], wanted), found
    assert "torch._dynamo" in sys.modules, "not used"
    print("equal")
    """
)


def run(planted: str) -> subprocess.CompletedProcess:
    program = PROGRAM.format(planted=planted)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def test_the_compiler_is_imported_when_it_is_used():
    done = run("")
    assert done.stdout.strip() == "equal", done.stderr


@pytest.mark.slow
def test_a_name_that_does_nothing_is_seen():
    planted = "import contextlib; masking_utils.TransformGetItemToIndex = contextlib.nullcontext"
    done = run(planted)
    assert done.returncode != 0
    assert "not used" in done.stderr, done.stderr


@pytest.mark.parametrize("version", ["5.17.0", None])
def test_another_transformers_is_imported_as_ever(monkeypatch, version):
    from lora_moe_rl.models import late_dynamo

    monkeypatch.delitem(sys.modules, late_dynamo.MODULE, raising=False)
    monkeypatch.setattr(late_dynamo, "installed", lambda package: version)
    with late_dynamo.late_dynamo():
        assert late_dynamo.MODULE not in sys.modules
