"""`lora-moe-rl bench memory`: what training keeps in memory, adapters against all parameters.

One rank, float32, the two tiny shapes with random weights; one micro-batch of 8 sequences of 64
tokens, one optimizer step. The same model is measured three times:

    adapters   the base is frozen, LoRA rank 16 on every linear
    base       the base is frozen and has no adapters; only the embeddings' output has a gradient
    all        no adapters; every parameter of the base is trained

`kept` is what autograd saves in the forward for the backward, parameters left out: each storage
counts once and whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lora_moe_rl.bench.model import save_random
from lora_moe_rl.bench.report import conclude, temporary
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.options import result_parser
from lora_moe_rl.tiny.make import TINY_NAMES
from lora_moe_rl.verify import report

SEQUENCES, TOKENS = 8, 64
ROWS = ("parameters", "trained", "gradients", "optimizer", "kept")
Bytes = dict[str, int]


def main(argv: Sequence[str]) -> int:
    parser = result_parser("bench memory", __doc__)
    options = parser.parse_args(argv)
    result = {name: measure_tiny(name) for name in TINY_NAMES}
    conclude(result, options.json, parts)
    return 0


def measure_tiny(name: str) -> dict[str, Bytes]:
    """`{"adapters", "base", "all": {row: bytes}}` of one tiny shape."""
    from lora_moe_rl.tiny.shapes import EXTRA_CONFIG, build_model
    from lora_moe_rl.verify.ranks import run_ranks

    with temporary() as folder:
        save_random(Path(folder), lambda: build_model(name), EXTRA_CONFIG[name])
        trainer = {"device": "cpu", "micro_batch_tokens": SEQUENCES * TOKENS}
        config = RunConfig(model=folder, trainer=trainer, adapter={"rank": 16})
        return run_ranks(config, Path(folder), measure)[0]


def measure(worker: Any, spec: Any) -> dict[str, Bytes]:
    """All three, on one rank (a job of `verify.ranks`)."""
    engine = worker.engine
    adapters = Kept(engine)
    engine.optimizer.step()
    mine = engine.adapters.parameters()
    base = base_parameters(engine)
    everything = _bytes(base)
    result = {
        "adapters": {
            "parameters": everything + _bytes(mine),
            "trained": _bytes(mine),
            "gradients": _bytes(engine.adapters.gradients.flat.values()),
            "optimizer": optimizer_bytes(engine.optimizer.adam),
            "kept": adapters.bytes,
        }
    }
    with engine.adapters.off():
        frozen = Kept(engine, with_embeddings=True)
        nothing = dict.fromkeys(("trained", "gradients", "optimizer"), 0)
        result["base"] = {"parameters": everything, **nothing, "kept": frozen.bytes}
        result["all"] = _train_everything(engine, base, everything)
    return result


def _train_everything(engine, base: list, everything: int) -> Bytes:
    import torch

    for parameter in base:
        parameter.requires_grad_()
    try:
        trained = Kept(engine, trained_head=True)
        grads = [p.grad for p in base if p.grad is not None]
        adam = torch.optim.AdamW([p for p in base if p.grad is not None])
        adam.step()
        return {
            "parameters": everything,
            "trained": everything,
            "gradients": _bytes(grads),
            "optimizer": optimizer_bytes(adam),
            "kept": trained.bytes,
        }
    finally:
        for parameter in base:
            parameter.requires_grad_(False).grad = None


def base_parameters(engine) -> list:
    """The base's parameters; of grouped experts, whose weights are views of one tensor, that."""
    mine = {id(p) for p in engine.adapters.parameters()}
    out = []
    for chunk in engine.chunks:
        stacks = {
            m.stacked.untyped_storage().data_ptr(): m.stacked
            for m in chunk.modules()
            if hasattr(m, "stacked")
        }
        out += stacks.values()
        out += [
            p
            for p in chunk.parameters()
            if id(p) not in mine and p.untyped_storage().data_ptr() not in stacks
        ]
    return out


def optimizer_bytes(optimizer) -> int:
    return _bytes(value for state in optimizer.state.values() for value in state.values())


class Kept:
    """One forward and backward of one micro-batch, and what autograd saved between them.

    `bytes` of all storages that are not parameters' or buffers'. `with_embeddings`: the output of
    the embeddings has a gradient, as it has when they are trained. `trained_head`: so has the
    output head, which the trainer's own form of it gives none.
    """

    def __init__(self, engine, with_embeddings: bool = False, trained_head: bool = False):
        import torch

        tensors = [t for c in engine.chunks for t in (*c.parameters(), *c.buffers())]
        self.known = {t.untyped_storage().data_ptr() for t in tensors}
        self.saved: dict[int, Any] = {}
        hooks = torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor)
        handle = None
        if with_embeddings:
            handle = engine.chunks[0].embedding.register_forward_hook(
                lambda module, inputs, output: output.requires_grad_()
            )
        try:
            with hooks:
                if trained_head:
                    loss, head = partial(_loss_of_logits, engine), None
                else:
                    loss, head = _loss, engine.head(1.0)
                engine.forward_backward(_work(engine), loss, head, divisor=1.0)
        finally:
            if handle is not None:
                handle.remove()
        self.bytes = sum(storage.nbytes() for storage in self.saved.values())
        self.saved.clear()

    def _save(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.known:
            self.saved[storage.data_ptr()] = storage  # held, so that its address is not used again
        return tensor


def _work(engine) -> list:
    import numpy as np

    from lora_moe_rl.data.batch import TrainBatch

    rng = np.random.default_rng(0)
    ids = rng.integers(0, engine.spec.shape.vocab_size, (SEQUENCES, TOKENS + 1))
    batch = TrainBatch.from_sequences(ids)
    return engine.my_work(batch, range(SEQUENCES), None, 1, 0)


def _loss_of_logits(engine, work, logits):
    import torch

    from lora_moe_rl.trainer.plain_head import token_logprobs

    labels = torch.from_numpy(work.data.labels).long()[None]
    return _loss(work, token_logprobs(logits, labels, 1.0, engine.spec.shape.vocab_size))


def _loss(work, logprobs):
    import torch

    return -logprobs.sum(), torch.tensor(logprobs.numel(), dtype=torch.int), {}


def _bytes(tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def parts(result: dict[str, dict[str, Bytes]]) -> Iterator[Any]:
    """What is printed of the figures: a table of each model."""
    for name, columns in result.items():
        table = report.table(["", *columns], f"{name}, KiB")
        for row in ROWS:
            table.add_row(row, *(f"{values[row] / 1024:,.0f}" for values in columns.values()))
        yield table
