"""Names under which verl and TRL users know a correction, and the settings that it stands for.

decoupled: the clipped ratio is the trainer's, new against old, and what lies between trainer and
engine is corrected (verl's bypass_mode=false). bypass: the ratio is of the new policy against the
engine (bypass_mode=true). The bounds are verl's, of trainer to engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TOKEN = {"correction": "token_truncate", "correction_max": 2.0}
_SEQUENCE = {"correction": "sequence_truncate", "correction_max": 2.0}
_ICEPOP = {"correction": "token_mask", "correction_min": 0.5, "correction_max": 5.0}
_NONE = {"correction": "none"}
_GEOMETRIC = {"rejection": "sequence_mean", "rejection_min": 0.999, "rejection_max": 1.001}
_PRODUCT = {"rejection": "sequence_sum", "rejection_min": 0.5, "rejection_max": 2.0}
_K3 = {"rejection": "sequence_mean", "rejection_divergence": "k3", "rejection_max": 0.01}
_BYPASS_CLIP = {"anchor": "rollout", "loss": "ppo_clip"}
_BYPASS_PG = {"anchor": "rollout", "loss": "reinforce"}

CORRECTION_PRESETS: dict[str, dict[str, Any]] = {
    "tis": _TOKEN,
    "icepop": _ICEPOP,
    "mis": {"correction": "sequence_mask", "correction_max": 3.0},
    "decoupled_token_is": _TOKEN,
    "decoupled_seq_is": _SEQUENCE,
    "decoupled_token_icepop": _ICEPOP,
    "decoupled_seq_is_rs": _SEQUENCE | _PRODUCT,
    "decoupled_geo_rs": _NONE | _GEOMETRIC,
    "decoupled_geo_rs_token_tis": _TOKEN | _GEOMETRIC,
    "decoupled_geo_rs_seq_tis": _SEQUENCE | _GEOMETRIC,
    "decoupled_k3_rs": _NONE | _K3,
    "decoupled_k3_rs_token_tis": _TOKEN | _K3,
    "decoupled_k3_rs_seq_tis": _SEQUENCE | _K3,
    "bypass_ppo_clip": _NONE | _BYPASS_CLIP,
    "bypass_ppo_clip_geo_rs": _NONE | _BYPASS_CLIP | _GEOMETRIC,
    "bypass_ppo_clip_k3_rs": _NONE | _BYPASS_CLIP | _K3,
    "bypass_pg_is": _SEQUENCE | _BYPASS_PG,
    "bypass_pg_token_icepop": _ICEPOP | _BYPASS_PG,
    "bypass_pg_geo_rs": _NONE | _BYPASS_PG | _GEOMETRIC,
    "bypass_pg_geo_rs_token_tis": _TOKEN | _BYPASS_PG | _GEOMETRIC,
    "bypass_pg_geo_rs_seq_tis": _SEQUENCE | _BYPASS_PG | _GEOMETRIC,
}


def settings_of(correction: str) -> Mapping[str, Any]:
    """What a name stands for; a correction's own name for itself."""
    return CORRECTION_PRESETS.get(correction, {"correction": correction})
