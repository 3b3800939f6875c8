"""What autograd keeps of one layer and micro-batch between the forward and the backward.

Counted operation by operation, for two sets of modules. FUSED are those of a GPU that has
Transformer Engine: its attention, and one kernel for an activation and what it is multiplied by.
LOCAL are all others (`trainer/local_modules.py`), which torch's own operations are made of. Both
have adapters as in `adapters/layers.py`. The base is frozen: what only the gradient of a weight
would need is kept where an adapter reads it. Experts are taken to be evenly loaded, and sequences
to be equally long: LOCAL attention pads those of about a length to the longest of them.

Figures are bytes of one of a rank's tokens of the micro-batch (of cp ranks each has its share),
but for the head's. Letters: h hidden size, t tensor-parallel ranks (activations outside attention
and MLPs are cut over them: sequence parallelism), n expert rows a token on one rank, b bytes an
activation.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import TrainerConfig
from lora_moe_rl.config.trainer import has_transformer_engine
from lora_moe_rl.planner.facts import Facts
from lora_moe_rl.trainer.logits import LOGIT_BYTES, rows_at_once


class Modules(NamedTuple):
    """`gated`: widths of a gated MLP that are kept, `gated_rows`: of experts, whose rows are
    weighted; `router`, `sigmoid_router`: bytes an expert and token; `rotary`: cosines and sines
    that are kept, each as wide as a head's rotated part."""

    gated: int
    gated_rows: int
    router: int
    sigmoid_router: int
    rotary: int


# Gate and up, and their product, weighted or not, which the next linear reads. Of the router
# logits and scores in float32, their normalised ones, the map.
FUSED = Modules(3, 3, 13, 13, 0)
# Gate and up; SiLU of the gate; up once more, to which mcore adds glu_linear_offset, 0; their
# product; and of experts the weighted one. Of the router its scores in float32 (of sigmoids twice:
# before and after the correction) and the order of all tokens for each expert, int64. Of the rotary
# embedding cosines and sines, of queries and again of keys.
LOCAL = Modules(5, 6, 12, 16, 4)
STATISTIC = 4  # float32 a head and token: the log-sum of its scores, a norm's scale
HEAD_ROWS = 3
CHUNK = 64  # tokens of a chunk of linear attention


def modules_of(trainer: TrainerConfig) -> Modules:
    """Those that a rank builds, if it has the packages that are here."""
    return FUSED if trainer.device != "cpu" and has_transformer_engine() else LOCAL


def kept_by_layer(
    facts: Facts, spec: AdapterSpec, layer: int, trainer: TrainerConfig, b: int, modules: Modules
) -> dict[str, float]:
    """`{part: bytes a token}` of one layer without recomputation."""
    shape, t = facts.shape, trainer.tp
    kept = {
        "norms and linear inputs": 4 * shape.hidden_size * b / t,
        "attention": _attention(facts, spec, layer, trainer, b, modules),
        "adapters": _adapters(spec, layer, trainer, b),
    }
    d = shape.dims
    if layer not in shape.moe_layers:
        return kept | {"MLP": modules.gated * d["intermediate"] * b / t}
    rows = shape.top_k / t
    inner = modules.gated_rows * d["moe_intermediate"]
    kept["experts"] = rows * b * (shape.hidden_size * trainer.etp + inner)
    router = modules.sigmoid_router if shape.family.router == "sigmoid" else modules.router
    kept["router"] = shape.num_experts * router / t + rows * 12
    kept["MLP"] = modules.gated * d["shared_intermediate"] * b / t
    return kept


def kept_when_recomputed(shape: ModelShape, t: int, b: int) -> float:
    """Bytes a token of one layer whose input alone is kept."""
    return shape.hidden_size * b / t


def layer_work(shape: ModelShape, trainer: TrainerConfig, b: int) -> float:
    """Bytes a token of the gradients that are alive at once inside one layer's backward: those of
    the experts' input and of their two inner activations, or of queries, keys, values and what
    attention gives; and of the layer's own input."""
    d, rows = shape.dims, shape.top_k / trainer.tp
    experts = rows * b * (2 * shape.hidden_size * trainer.etp + 3 * d["moe_intermediate"])
    dense = 3 * d["intermediate"] * b / trainer.tp
    query, key = attended_widths(shape, trainer)
    attention = 2 * (query + key) * b / trainer.tp
    inner = max(experts if shape.moe_layers else dense, attention)
    return inner + 2 * shape.hidden_size * b / trainer.tp


def communication(shape: ModelShape, trainer: TrainerConfig, b: int) -> float:
    """Bytes a token of buffers that collectives write into: the gathered input of a linear, tokens
    sent to and received from experts, a hidden state to and from the next stage."""
    gathered = shape.hidden_size * b if trainer.tp > 1 else 0
    exchanged = 2 * shape.top_k / trainer.tp * shape.hidden_size * b if shape.moe_layers else 0
    if trainer.ep * trainer.etp == 1:
        exchanged = 0  # tokens stay where they are: mcore makes no buffers
    staged = 4 * shape.hidden_size * b / trainer.tp if trainer.pp > 1 else 0
    return gathered + exchanged + staged


def head(shape: ModelShape, t: int, tokens: int, b: int, entropy: bool, divergence: bool) -> int:
    """Bytes of a micro-batch of so many tokens: logits of a few rows, and of each token three
    hidden states: what its logprob has kept, and its gradient, twice in the backward; and what its
    entropy has kept, where that is trained, and its divergence from a teacher, which also wants
    logits once more."""
    columns = math.ceil(shape.vocab_size / t)
    logits = (LOGIT_BYTES + 4 * divergence) * min(tokens, rows_at_once(columns)) * columns
    return logits + (HEAD_ROWS + entropy + divergence) * tokens * shape.hidden_size * b


def widths(shape: ModelShape) -> tuple[int, int]:
    """All queries of a token and all its keys, which with MLA have as many heads. Values are as
    wide as keys where attention sees them: mcore pads those of MLA."""
    d = shape.dims
    if shape.family.attention == "mla":
        query = d["heads"] * (d["nope_dim"] + d["rope_dim"])
        return query, query
    return d["heads"] * d["head_dim"], d["kv_heads"] * d["head_dim"]


def attended_widths(shape: ModelShape, trainer: TrainerConfig) -> tuple[float, float]:
    """As `widths`, where attention sees them: key/value heads that are fewer than cp ranks are
    repeated before they are exchanged."""
    query, key = widths(shape)
    kv_heads = shape.dims.get("kv_heads", shape.dims["heads"])
    return query, key * max(1, trainer.cp * trainer.tp / kv_heads)


def _attention(
    facts: Facts, spec: AdapterSpec, layer: int, trainer: TrainerConfig, b: int, modules: Modules
) -> float:
    if facts.shape.family.attention == "mla":
        adapted = f"layers.{layer}.kv_b_proj" in spec.by_name
        return _mla(facts, adapted, trainer.tp, b, modules)
    if layer in facts.shape.linear_layers:
        return _delta(facts.shape, trainer, b, modules)
    gated = facts.shape.family.attention == "gated_gqa"
    # The gates as they are projected, in float32 and through the sigmoid, and the gated output.
    gates = (2 * b + 2 * 4) * widths(facts.shape)[0] / trainer.tp if gated else 0
    return _gqa(facts, trainer, b, modules) + gates


def _delta(shape: ModelShape, trainer: TrainerConfig, b: int, modules: Modules) -> float:
    """The bytes of a token that linear attention keeps, by arithmetic. LOCAL computes in float32,
    and inverts a matrix of every chunk of 64 tokens and head, row after row: of each row that is
    there it keeps what it multiplies."""
    d, t = shape.dims, trainer.tp
    heads = d["linear_value_heads"]
    keys, values = d["linear_key_heads"] * d["linear_key_dim"], heads * d["linear_value_dim"]
    repeated = heads * d["linear_key_dim"]
    # The projection, what the convolution gives, queries and keys of unit length for every value
    # head, values; the output, normed and gated.
    attended = (2 * keys + 2 * values) + (2 * keys + values) + 2 * repeated + values + 3 * values
    if trainer.cp > 1:
        attended += (2 * keys + values) + values  # exchanged, there and back
    if modules is FUSED:
        return (attended * b + 4 * repeated * d["linear_value_dim"] / CHUNK) / t
    again = 4 * (4 * repeated + 4 * values)
    rows = heads * 4 * CHUNK**2 / 3
    return (attended * b + again + rows + 4 * repeated * d["linear_value_dim"] / CHUNK) / t


def _mla(facts: Facts, adapted: bool, t: int, b: int, modules: Modules) -> float:
    """`adapted`: whether the projection of the compressed keys and values is."""
    d, (query, _) = facts.shape.dims, widths(facts.shape)
    value = d["heads"] * d["v_dim"]
    # Queries, keys, values, which mcore pads to the width of keys, and so the output; cut back, it
    # is what the last linear reads.
    attended = 4 * query + value
    # What the compressed queries' norm reads and gives, and what the other one's reads; what that
    # gives is read by no other adapter.
    low = 2 * d["q_lora_rank"] + (1 + adapted) * d["kv_lora_rank"] + d["rope_dim"]
    rotary = max(1, modules.rotary) * d["rope_dim"]  # FUSED: the key's rotated part, of all ranks
    return (attended + low) * b / t + rotary * b + d["heads"] * STATISTIC / t


def _gqa(facts: Facts, trainer: TrainerConfig, b: int, modules: Modules) -> float:
    t = trainer.tp
    d, normed = facts.shape.dims, facts.shape.family.qk_norm(facts.config)
    query, key = widths(facts.shape)
    fused, statistics = modules is FUSED, d["heads"]
    attended = 2 * query + key  # rotated queries and keys, and the output
    if fused or normed:
        attended += query + 2 * key  # the projection: values, and keys to be normed, are views
    if normed:
        # Queries of several groups lie apart in the projection: their norm reads a copy.
        attended += query if d["kv_heads"] > t else 0
        # A scale for each head; for all together their norm and its scale, on every rank.
        together = facts.shape.family.norm_over_heads
        statistics += 4 * t if together else d["heads"] + d["kv_heads"]
    attended += 2 * (attended_widths(facts.shape, trainer)[1] - key)
    if not fused or trainer.cp > 1:
        # Padded or exchanged values, and of the output what the last linear reads.
        attended += key + query
    rope = facts.config.get("rope_parameters") or facts.config
    part = d["head_dim"] * (rope.get("partial_rotary_factor") or 1)
    rotated = facts.config.get("rotary_dim") or part
    return (attended * b + statistics * STATISTIC) / t + modules.rotary * rotated * b


def _adapters(spec: AdapterSpec, layer: int, trainer: TrainerConfig, b: int) -> float:
    """A x of every site: gathered over tp where B is cut over it."""
    total = 0.0
    for module in spec.shape.modules(layer):
        site = spec.by_name.get(f"layers.{layer}.{module}")
        if site is None:
            continue
        if site.num_experts is not None:
            total += site.rank * b * spec.shape.top_k / trainer.tp * trainer.etp
        elif module.rpartition(".")[2] in ("o_proj", "out_proj", "down", "q_a_proj", "kv_a_proj"):
            total += site.rank * b / trainer.tp
        else:
            total += site.rank * b
    return total
