"""One GPU: experts as vLLM's own CUDA repacking lays them out, dequantised by the Triton kernel and
multiplied by vLLM's Marlin kernel; and an engine's loader that holds them, which a trainer maps.

Run with `make test-gpu`.
"""

from __future__ import annotations

import multiprocessing
import socket
from pathlib import Path

import pytest
import torch
from packed_cases import draw

from lora_moe_rl.base.held import Held
from lora_moe_rl.base.ipc import Cuda
from lora_moe_rl.files.untrusted import SafeWeights
from lora_moe_rl.kernels.dequant import Packed, dequantise
from lora_moe_rl.kernels.dequant.formats import MARLIN
from lora_moe_rl.models.quantised_weights import read_linear
from lora_moe_rl.refit.merged_base import Base

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
pytest.importorskip("vllm")
SPAWN = multiprocessing.get_context("spawn")
# (experts, width, hidden size): Kimi-K2-Thinking's, and of one that is cut into eight.
SIZES = {"tiny": (3, 64, 128), "kimi": (2, 2048, 7168), "kimi, an eighth": (2, 256, 7168)}


def on_gpu(packed: Packed) -> Packed:
    return Packed(packed.form, packed.data.cuda(), packed.scales.cuda())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", MARLIN)
def test_what_vllms_cuda_lays_out_is_dequantised_to_the_bit(form, size):
    from marlin import _int4, _mxfp4, laid_out

    E, width, hidden = SIZES[size]
    w13, w2 = draw(form, (E, 2 * width, hidden)), draw(form, (E, hidden, width), seed=1)
    make = {"int4": _int4, "mxfp4": _mxfp4}[form]
    data13, data2, scales13, scales2 = make(on_gpu(w13), on_gpu(w2), torch.bfloat16)
    reference = laid_out(w13, w2)
    for plain, data, scales, by_torch in zip(
        (w13, w2), (data13, data2), (scales13, scales2), reference, strict=True
    ):
        scales = scales.view(torch.uint8) if form == "mxfp4" else scales
        assert torch.equal(data.cpu(), by_torch.data)
        assert torch.equal(scales.cpu(), by_torch.scales)
        theirs = Packed(MARLIN[form], data, scales)
        expected = dequantise(on_gpu(plain), torch.bfloat16, "torch")
        for kernel in ("triton", "torch"):
            assert torch.equal(dequantise(theirs, torch.bfloat16, kernel), expected)


def test_vllms_marlin_kernel_multiplies_by_these_numbers():
    """One input at a time, so that no sum is rounded."""
    from marlin import _int4
    from vllm.model_executor.layers.quantization.utils import marlin_utils
    from vllm.scalar_type import scalar_types

    w13, w2 = draw("int4", (1, 256, 512)), draw("int4", (1, 512, 128), seed=1)
    data13, _, scales13, _ = _int4(on_gpu(w13), on_gpu(w2), torch.bfloat16)
    empty = marlin_utils.marlin_make_empty(data13.device)
    found = marlin_utils.apply_gptq_marlin_linear(
        torch.eye(512, dtype=torch.bfloat16, device="cuda"), data13[0], scales13[0], empty, None,
        scalar_types.uint4b8, 256, 512,
    )  # fmt: skip
    ours = dequantise(Packed("int4_marlin", data13, scales13), torch.bfloat16, "triton")
    assert torch.equal(found.T, ours[0])


@pytest.mark.parametrize("form", MARLIN)
def test_an_engines_loader_holds_them_and_a_trainer_maps_them(form, tmp_path):
    from marlin_engine import load
    from quantised import make_pair

    sizes = {"hidden_size": 128, "moe_intermediate_size": 64}
    model, _ = make_pair("qwen3_moe", tmp_path / "model", form, **sizes)
    folder, answers, end = tmp_path / "held", SPAWN.Queue(), SPAWN.Event()
    folder.mkdir()
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    arguments = str(folder), str(model), form, 0, 1, port, answers, end, True
    process = SPAWN.Process(target=load, args=arguments)
    process.start()
    try:
        _, seen = answers.get(timeout=300)
        assert isinstance(seen, list), seen
        for done, (_, memory) in enumerate(seen):
            assert all(memory[:done]) and max(memory[done:]) < 2**12
        check_mapped(Held(str(folder), str(model), "bfloat16", 1, False, True, True), model)
    finally:
        end.set()
        process.join(60)


def check_mapped(held: Held, model: Path) -> None:
    mapped, stacks, base = held.map(Cuda()), held.stacks(), Base(str(model))
    scales = {one.megatron.removesuffix(".scales"): one for one in stacks if one.scales}
    assert held.form is not None and held.layout == MARLIN[held.form]
    with SafeWeights.open(model) as weights:
        for stack in (one for one in stacks if not one.scales):
            data, of_groups = mapped[stack.name][0], mapped[scales[stack.megatron].name][0]
            found = dequantise(Packed(held.layout, data, of_groups), torch.bfloat16)
            for expert, numbers in enumerate(found):
                paths = [base.name(stack.layer, module, expert) for module in stack.modules]
                parts = [read_linear(weights, path, held.form) for path in paths]
                plain = torch.cat([dequantise(part, torch.bfloat16) for part in parts])
                assert torch.equal(numbers.cpu(), plain), paths
    base.weights.close()
    mapped.check()
