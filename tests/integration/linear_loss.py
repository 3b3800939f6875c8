"""One forward and backward that every library can do: a fixed linear function of all logits.

loss = sum over tokens t of weights[t] . logits[t], so that each logit, and through it each adapter
tensor, has a gradient of its own, and no library's loss code comes into it.
"""

from __future__ import annotations

import numpy as np
import torch

LENGTHS = (7, 12, 3, 16)


def sequences(vocab_size: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, n) for n in LENGTHS]


def weights(vocab_size: int, seed: int = 1) -> torch.Tensor:
    """float32 `[tokens of all sequences, vocabulary]`; logits of about 1 make a loss of about 1."""
    rng = np.random.default_rng(seed)
    tokens = sum(LENGTHS)
    values = rng.normal(0, 1 / np.sqrt(tokens * vocab_size), (tokens, vocab_size))
    return torch.from_numpy(values.astype(np.float32))


def megatron_logits(model, vocab_size: int) -> torch.Tensor:
    """float32 `[tokens, vocabulary]` of all sequences, packed as the trainer packs them.

    Tokens fill up to an even number, for two tensor-parallel ranks; those logits are left out.
    """
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    from lora_moe_rl.data.batch import TrainBatch
    from lora_moe_rl.data.packing import pack
    from lora_moe_rl.trainer.device import Device
    from lora_moe_rl.trainer.packed_sequences import packed_params

    # The trainer feeds all but the last token of a sample.
    batch = TrainBatch.from_sequences([[*ids, 0] for ids in sequences(vocab_size)])
    data = pack(batch, range(len(batch.token_ids)), multiple=2)
    logits = model(
        input_ids=torch.from_numpy(data.input_ids)[None],
        position_ids=torch.from_numpy(data.positions)[None],
        attention_mask=None,
        packed_seq_params=packed_params(data, Device("cpu", torch.float32), slice(None)),
    )
    logits = gather_from_tensor_model_parallel_region(logits)
    return logits[0, : sum(LENGTHS), :vocab_size]


def hugging_face_logits(model, vocab_size: int) -> torch.Tensor:
    """The same of a Hugging Face model, one sequence at a time."""
    ids = [torch.from_numpy(s)[None] for s in sequences(vocab_size)]
    return torch.cat([model(s).logits[0] for s in ids])


def backward(logits: torch.Tensor) -> np.ndarray:
    """Accumulates gradients; returns the logits."""
    (weights(logits.shape[-1]) * logits).sum().backward()
    return logits.detach().numpy()


def relative(got: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference, as a part of the largest expected value."""
    return float(np.abs(got - expected).max() / np.abs(expected).max())


def worst(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> tuple[float, str]:
    """The largest relative difference of all tensors, and whose it is."""
    assert got.keys() == expected.keys() and got
    assert all(np.abs(value).max() > 0 for value in expected.values()), "a gradient is zero"
    return max((relative(got[name], expected[name]), name) for name in expected)


def our_step(worker, tensors: dict[str, np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(logits, canonical gradients) of the trainer's model, on one rank, with that adapter."""
    engine = worker.engine
    worker.set_adapter(tensors)
    engine.adapters.gradients.zero()
    logits = backward(megatron_logits(engine.chunks[0].train(), engine.spec.shape.vocab_size))
    shards = engine.adapters.export(lambda parameter: parameter.grad)
    return logits, {shard.name: shard.data for shard in shards}
