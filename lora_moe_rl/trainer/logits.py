"""How many logits the trainer's head has at a time. Imports nothing: the planner asks too."""

from __future__ import annotations

ELEMENTS_AT_ONCE = 2**25
# Bytes of each at the worst moment: in float32 logits and their exponentials, and these once more
# in bf16 for their product with the head's weights.
LOGIT_BYTES = 4 + 4 + 2


def rows_at_once(columns: int) -> int:
    """Rows of `columns` logits each."""
    return max(1, ELEMENTS_AT_ONCE // columns)
