"""What Hugging Face chooses in float32, and what it computes in float64, with given routes: the
reference of `verify replay`.

How far its own float32 is from that is what rounding does to this model on these tokens.

A route that the record has otherwise is a tie within rounding when this layer of Hugging Face
itself chooses as recorded once its input is disturbed in the last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.router_replay.table import RouteTable
from lora_moe_rl.verify import hf, replay_tables
from lora_moe_rl.verify.comparisons import scaled

ROUNDING, TRIES = 1e-5, 32  # of a layer's input, relative; how often it is disturbed
WEIGHT_ERROR = 1e-5


@dataclass
class Reference:
    """Where Hugging Face chose other experts itself."""

    routes: int = 0
    ties: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)


class HuggingFace:
    """A model, with an adapter merged by hand or none."""

    def __init__(self, model: torch.nn.Module, spec: AdapterSpec):
        self.model, self.spec = model, spec
        self.sigmoid = spec.shape.family.router == "sigmoid"
        # Of a router's output: that of experts that are modules gives them last.
        self.logits_place = -1 if spec.shape.family.experts == "modules" else 0

    @torch.no_grad()
    def compare(
        self,
        sequences: Sequence[Sequence[int]],
        rows: Sequence[np.ndarray],
        valid: Sequence[np.ndarray],
    ) -> Reference:
        """Each row of routes `[L - 1, moe_layers, top_k]` beside Hugging Face's own choice."""
        found = Reference()
        for i, (sequence, given, known) in enumerate(zip(sequences, rows, valid, strict=True)):
            with self._watched() as calls:
                hf.logprobs(self.model, sequence)
            for column, layer in enumerate(self.spec.shape.moe_layers):
                hidden, own = calls[layer]
                own = np.sort(own[: len(given)].numpy(), axis=-1)
                wanted = np.sort(given[:, column].astype(np.int64), axis=-1)
                found.routes += int(known[:, column].sum()) * wanted.shape[1]
                for token in np.flatnonzero((own != wanted).any(-1) & known[:, column]):
                    text = (
                        f"sample {i}, token {token}, layer {layer}: recorded "
                        f"{wanted[token].tolist()}, Hugging Face {own[token].tolist()}"
                    )
                    tie = self._is_tie(layer, hidden[token], wanted[token])
                    (found.ties if tie else found.differences).append(text)
        return found

    @torch.no_grad()
    def replay(
        self,
        sequences: Sequence[Sequence[int]],
        rows: Sequence[np.ndarray],
        valid: Sequence[np.ndarray],
    ) -> list[np.ndarray]:
        """Logprobs with these experts in place of the model's own, where they are valid, and
        weights from its scores."""
        logprobs = []
        for sequence, given, known in zip(sequences, rows, valid, strict=True):
            ids = torch.from_numpy(given.astype(np.int64))
            with self._forced(ids, torch.from_numpy(known)):
                logprobs.append(hf.logprobs(self.model, sequence))
        return logprobs

    def _layers(self) -> Iterator[tuple[int, int, torch.nn.Module]]:
        for column, layer in enumerate(self.spec.shape.moe_layers):
            yield column, layer, self.model.get_submodule(f"model.layers.{layer}.mlp")

    @contextmanager
    def _watched(self) -> Iterator[dict[int, tuple[torch.Tensor, torch.Tensor]]]:
        """{layer: (input of the MoE layer `[L, H]`, experts chosen `[L, top_k]`)}."""
        calls: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def note(layer: int):
            def hook(module, args):
                hidden, chosen = args[0], args[1]
                calls[layer] = (hidden.reshape(-1, hidden.shape[-1]), chosen)

            return hook

        with _hooks((mlp, note(layer)) for _, layer, mlp in self._layers()):
            yield calls

    @contextmanager
    def _forced(self, routes: torch.Tensor, known: torch.Tensor) -> Iterator[None]:
        """The last token, which has no row, is routed freely: nothing comes after it."""
        logits: dict[int, torch.Tensor] = {}

        def keep(layer: int):
            def hook(module, args, out):
                logits[layer] = out[self.logits_place] if isinstance(out, tuple) else out

            return hook

        def force(column: int, layer: int):
            def hook(module, args):
                hidden, own, weights = args
                told = logits[layer] if layer in logits else _logits(gates[layer], hidden)
                mine = self._weights(told, own)
                error = float((mine - weights).abs().max())
                if error > WEIGHT_ERROR * float(weights.abs().max()):
                    raise RuntimeError(
                        f"layer {layer}: Hugging Face weighs experts otherwise (by {error:.2g})"
                    )
                chosen = own.clone()
                chosen[: len(routes)][known[:, column]] = routes[known[:, column], column]
                return hidden, chosen, self._weights(told, chosen)

            return hook

        layers = list(self._layers())
        gates = {layer: _gate(mlp) for _, layer, mlp in layers}
        kept = [gate.register_forward_hook(keep(layer)) for layer, gate in gates.items()]
        try:
            with _hooks((mlp, force(column, layer)) for column, layer, mlp in layers):
                yield
        finally:
            for handle in kept:
                handle.remove()

    def _weights(self, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Combine weights of the chosen experts, as the published models compute them."""
        config = self.model.config
        logits = logits.reshape(-1, logits.shape[-1]).float()
        scores = logits.sigmoid() if self.sigmoid else logits.softmax(-1)
        weights = scores.gather(1, chosen)
        if getattr(config, "norm_topk_prob", True):
            weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if self.sigmoid else 0))
        names = "routed_scaling_factor", "router_scaling_factor"
        return weights * next((getattr(config, n) for n in names if hasattr(config, n)), 1.0)

    def _is_tie(self, layer: int, hidden: torch.Tensor, wanted: np.ndarray) -> bool:
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(TRIES, len(hidden), generator=generator)
        disturbed = hidden * (1 + ROUNDING * noise)
        mlp = self.model.get_submodule(f"model.layers.{layer}.mlp")
        with self._watched() as calls:
            mlp(disturbed[None])
        chosen = calls[layer][1].sort(-1).values.numpy()
        return bool((chosen == wanted).all(-1).any())


def _gate(mlp: torch.nn.Module) -> torch.nn.Module:
    """Transformers' GPT-OSS has another name for it."""
    return mlp.get_submodule("router" if hasattr(mlp, "router") else "gate")


def _logits(gate: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Of one that transformers does not call, but takes the weight of (DeepSeek-V2)."""
    return torch.nn.functional.linear(hidden.float(), gate.get_parameter("weight").float())


@dataclass
class Expected:
    """What is expected of the sequences of a group, with the recorded routes and with the other
    experts: logprobs `[L - 1]` of each, in float64 and in float32. Where memory is too small for
    float64, both are float32."""

    exact: tuple[list[np.ndarray], ...]
    single: tuple[list[np.ndarray], ...]

    @property
    def in_float64(self) -> bool:
        return self.exact is not self.single

    def rounding(self) -> list[np.ndarray]:
        """Errors of float32, as `comparisons.scaled`."""
        return [scaled(*pair) for pair in zip(self.single, self.exact, strict=True)]


def expected(
    single: HuggingFace,
    model_dir: Path,
    tensors: Mapping[str, np.ndarray] | None,
    sequences: Sequence[Sequence[int]],
    tables: Sequence[RouteTable],
) -> Expected:
    """What the model of `single`, which has `tensors` merged into it, says with each of the
    tables."""

    def replayed(model: HuggingFace) -> tuple[list[np.ndarray], ...]:
        return tuple(model.replay(sequences, *replay_tables.rows_of(table)) for table in tables)

    ours = replayed(single)
    exact = hf.load_exact(model_dir, single.spec, tensors)
    if exact is None:
        return Expected(ours, ours)
    with hf.in_float64(exact):
        return Expected(replayed(HuggingFace(exact, single.spec)), ours)


def on_choice(mlp: torch.nn.Module, hook: Callable[..., Any]):
    """`hook(module, (hidden, experts chosen, weights))` runs before the experts of a block; what it
    gives is taken in their place. Experts that are modules are called one by one: it runs behind
    the router, which gives what they have in common."""
    if not isinstance(mlp.experts, torch.nn.ModuleList):
        return mlp.experts.register_forward_pre_hook(hook)

    def behind(gate, args, out):
        chosen, weights, *rest = out
        given = hook(gate, (args[0], chosen, weights))
        return None if given is None else (*given[1:], *rest)

    return mlp.gate.register_forward_hook(behind)


@contextmanager
def _hooks(pairs) -> Iterator[None]:
    handles = [on_choice(mlp, hook) for mlp, hook in pairs]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
