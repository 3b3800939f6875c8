"""vLLM's own Triton kernels for adapters of routed experts, in Triton's interpreter: slots that
have once what all experts share, and ranks up to the largest that they take. A program."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language
import vllm.triton_utils as of_vllm
from vllm.platforms import current_platform

from lora_moe_rl.rollout.facts import LARGEST_OF_EXPERTS

# vLLM's CPU build has none, and nothing asks how many multiprocessors a CPU has.
of_vllm.triton, of_vllm.tl, of_vllm.HAS_TRITON = triton, triton.language, True
type(current_platform).num_compute_units = classmethod(lambda cls, *args: 8)

import vllm.lora.ops.triton_ops.fused_moe_lora_op as kernels  # noqa: E402

SLOTS, EXPERTS, HIDDEN, INNER, TOKENS, TOP_K = 2, 6, 64, 32, 5, 3
SLOT_OF = torch.tensor([0, 1, -1, 0, 1], dtype=torch.int32)  # of each token; -1: no adapter
ENABLED = torch.tensor([1, 1, 0], dtype=torch.int32)
RELATIVE = 1e-5


def small(out, x, A, B, weights, chosen, down):
    common = (out, x, A, B, weights, chosen, SLOT_OF, TOP_K, ENABLED, down)
    kernels._run_fused_moe_lora_small_batch(*common)


def one_shot(out, x, A, B, weights, chosen, down):
    there = torch.tensor([-1, 0, 1], dtype=torch.int32), torch.tensor([3])
    unsorted = (None, chosen, None, SLOT_OF, A[0].shape[2], TOP_K)
    kernels._run_fused_moe_lora_one_shot(
        out, x, A, B, weights, *unsorted, *there, ENABLED, down, 16
    )


def run(kernel, rank: int, down: bool) -> None:
    """Gate and up with one A for all experts, or down with one B, by `kernel` and by hand."""
    generator = torch.Generator().manual_seed(rank)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    parts, width, out = (1, INNER, HIDDEN) if down else (2, HIDDEN, INNER)
    A = [random(SLOTS, EXPERTS if down else 1, rank, width) for _ in range(parts)]
    B = [random(SLOTS, 1 if down else EXPERTS, out, rank) for _ in range(parts)]
    chosen = torch.stack([torch.randperm(EXPERTS, generator=generator) for _ in range(TOKENS)])
    chosen = chosen[:, :TOP_K].int()
    weights = torch.rand(TOKENS, TOP_K, generator=generator)
    x = random(TOKENS * TOP_K if down else TOKENS, width)
    got = torch.zeros(TOKENS, TOP_K, parts * out)

    # As vLLM's LoRAExpertsMixin does it.
    def of_all(slots: list[torch.Tensor]) -> list[torch.Tensor]:
        return [one.expand(-1, EXPERTS, -1, -1) for one in slots]

    kernel(got, x, of_all(A), of_all(B), weights, chosen.reshape(-1), down)
    wanted = torch.zeros_like(got)
    for token, slot in enumerate(SLOT_OF.tolist()):
        for k, expert in enumerate(chosen[token].tolist() if slot >= 0 else []):
            row = x[token * TOP_K + k] if down else x[token]
            each = [
                b[slot, expert] @ (a[slot, expert] @ row)
                for a, b in zip(of_all(A), of_all(B), strict=True)
            ]
            wanted[token, k] = torch.cat(each) * (weights[token, k] if down else 1)
    error = float((got - wanted).abs().max() / wanted.abs().max())
    assert error < RELATIVE, f"{kernel.__name__}, rank {rank}, down {down}: {error:.1e}"


def main() -> None:
    for down in (False, True):
        run(small, 8, down)
        run(one_shot, 8, down)
        run(one_shot, LARGEST_OF_EXPERTS, down)
    try:
        run(one_shot, 2 * LARGEST_OF_EXPERTS, False)
    except AssertionError as error:
        assert "max_lora_rank" in str(error), error
    else:
        raise AssertionError("LARGEST_OF_EXPERTS is not what vLLM's kernels take at the most")


main()
