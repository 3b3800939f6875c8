"""transformers without torch's compiler, which it imports for one name.

`transformers/masking_utils.py` of 5.12, which `AutoTokenizer` imports, takes a context manager from
a file of `torch._dynamo`, and Python imports all of that package and of `torch._inductor` before:
half of what the tokenizer takes. The name stands for the same thing here, imported when it is used.
Importing this file imports no torch.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from lora_moe_rl.upstream.versions import installed, is_tested

MODULE, NAME = "torch._dynamo._trace_wrapped_higher_order_op", "TransformGetItemToIndex"


@contextmanager
def late_dynamo() -> Iterator[None]:
    """What is imported within it takes the name as it is here; all as ever with a transformers that
    was not tested, which may take more from that file."""
    if MODULE in sys.modules or not is_tested("transformers", installed("transformers") or ""):
        yield
        return
    sys.modules[MODULE] = stub = types.ModuleType(MODULE)
    setattr(stub, NAME, _late)
    try:
        yield
    finally:
        if sys.modules.get(MODULE) is stub:
            del sys.modules[MODULE]


def _late() -> Any:
    """The context manager itself."""
    return getattr(import_module(MODULE), NAME)()
