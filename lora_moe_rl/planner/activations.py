"""What autograd keeps of one layer and micro-batch between the forward and the backward.

Counted operation by operation for the layers that train here: Transformer Engine's (or torch's)
attention that keeps q, k, v, its output and a log-sum, experts whose activation is fused with the
routing weights, adapters as in `adapters/layers.py`. The base is frozen: what only the gradient of
a weight would need is kept where an adapter reads it. Experts are taken to be evenly loaded.

Figures are bytes a token of the micro-batch on one rank, but for the head's. Letters: h hidden
size, t tensor-parallel ranks (activations outside attention and MLPs are cut over them: sequence
parallelism), n expert rows a token on one rank, b bytes an activation.
"""

from __future__ import annotations

import math

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import TrainerConfig
from lora_moe_rl.trainer.logits import LOGIT_BYTES, rows_at_once

LOG_SUM = 4  # float32 a head and token
HEAD_ROWS = 3
ROUTER = 13  # an expert and token: logits and scores in float32, their normalised ones, the map


def kept_by_layer(
    spec: AdapterSpec, layer: int, trainer: TrainerConfig, b: int
) -> dict[str, float]:
    """`{part: bytes a token}` of one layer without recomputation."""
    shape, t = spec.shape, trainer.tp
    kept = {
        "norms and linear inputs": 4 * shape.hidden_size * b / t,
        "attention": _attention(shape, t, b),
        "adapters": _adapters(spec, layer, trainer, b),
    }
    d = shape.dims
    if layer not in shape.moe_layers:
        return kept | {"MLP": 3 * d["intermediate"] * b / t}
    rows = shape.top_k / t
    kept["experts"] = rows * b * (shape.hidden_size * trainer.etp + 3 * d["moe_intermediate"])
    kept["router"] = shape.num_experts * ROUTER / t + rows * 12
    kept["MLP"] = 3 * d["shared_intermediate"] * b / t
    return kept


def kept_when_recomputed(shape: ModelShape, t: int, b: int) -> float:
    """Bytes a token of one layer whose input alone is kept."""
    return shape.hidden_size * b / t


def layer_work(shape: ModelShape, trainer: TrainerConfig, b: int) -> float:
    """Bytes a token of the gradients that are alive at once inside one layer's backward: those of
    the experts' input, of their two inner activations and of the layer's own input."""
    d, rows = shape.dims, shape.top_k / trainer.tp
    experts = rows * b * (2 * shape.hidden_size * trainer.etp + 3 * d["moe_intermediate"])
    dense = 3 * d["intermediate"] * b / trainer.tp
    inner = experts if shape.moe_layers else dense
    return max(inner, _attention(shape, trainer.tp, b)) + 2 * shape.hidden_size * b / trainer.tp


def communication(shape: ModelShape, trainer: TrainerConfig, b: int) -> float:
    """Bytes a token of buffers that collectives write into: the gathered input of a linear, tokens
    sent to and received from experts, a hidden state to and from the next stage."""
    gathered = shape.hidden_size * b if trainer.tp > 1 else 0
    exchanged = 2 * shape.top_k / trainer.tp * shape.hidden_size * b if shape.moe_layers else 0
    staged = 4 * shape.hidden_size * b / trainer.tp if trainer.pp > 1 else 0
    return gathered + exchanged + staged


def head(shape: ModelShape, t: int, tokens: int, b: int) -> int:
    """Bytes of a micro-batch of so many tokens: logits of a few rows, and of each token three
    hidden states: what its logprob has kept, and its gradient, twice in the backward."""
    columns = math.ceil(shape.vocab_size / t)
    logits = LOGIT_BYTES * min(tokens, rows_at_once(columns)) * columns
    return logits + HEAD_ROWS * tokens * shape.hidden_size * b


def _attention(shape: ModelShape, t: int, b: int) -> float:
    d = shape.dims
    log_sum = d["heads"] * LOG_SUM / t
    if shape.family.attention == "mla":
        query = d["heads"] * (d["nope_dim"] + d["rope_dim"])
        value = d["heads"] * d["v_dim"]
        low = 2 * d["q_lora_rank"] + 2 * d["kv_lora_rank"] + d["rope_dim"]
        return (2 * query + 2 * value + low) * b / t + d["rope_dim"] * b + log_sum
    query, key = d["heads"] * d["head_dim"], d["kv_heads"] * d["head_dim"]
    # The fused projection (v is a view of it), rotated q and k, and the output.
    return (query + 2 * key + query + key + query) * b / t + log_sum


def _adapters(spec: AdapterSpec, layer: int, trainer: TrainerConfig, b: int) -> float:
    """A x of every site: gathered over tp where B is cut over it."""
    total = 0.0
    for module in spec.shape.modules(layer):
        site = spec.by_name.get(f"layers.{layer}.{module}")
        if site is None:
            continue
        if site.num_experts is not None:
            total += site.rank * b * spec.shape.top_k / trainer.tp * trainer.etp
        elif module.rpartition(".")[2] in ("o_proj", "down", "q_a_proj", "kv_a_proj"):
            total += site.rank * b / trainer.tp
        else:
            total += site.rank * b
    return total
